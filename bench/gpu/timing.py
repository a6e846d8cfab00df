"""Times of device work and of host calls.

On a machine without a GPU everything runs on CPU tensors, on the host's clock and few times, to try the benchmark out:
such figures mean nothing.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CYCLES = 2_000_000  # about a millisecond in which the host gets ahead of the device


def finish() -> None:
    if GPU:
        torch.cuda.synchronize()


def graph_of(calls: Sequence[Call]) -> Call:
    """Replays all `calls` in turn. They run once outside the graph first."""
    if not GPU:
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay() -> None:
        graph.replay()
        _ = kept  # what is captured reads and writes it

    return replay


def device_time(calls: Sequence[Call], *, rounds: int = 15, ahead: int = CYCLES) -> float:
    """Seconds of device work a call: all calls in turn, between two events; median of the rounds.

    The device sleeps first, so that it does not wait for the host; but for that the host must need less time to issue
    the calls than the device takes.
    """
    for call in calls:
        call()
    finish()
    times = []
    for _ in range(rounds if GPU else 1):
        if GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ahead)
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            started = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - started)
    return statistics.median(times) / len(calls)


def time_beside(call: Call, other: Call, *, rounds: int = 7) -> float:
    """Seconds of device work of `call`, while `other` runs on another stream, which begins first; median.

    `other` must take longer than `call`.
    """
    if not GPU:
        other()
        return device_time([call])
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    times = []
    for _ in range(rounds):
        finish()
        begun, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            begun.record()
            other()
            other()
        here.wait_event(begun)
        torch.cuda._sleep(CYCLES // 20)  # `other` has begun by then
        start.record()
        call()
        end.record()
        finish()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def host_time(call: Call, *, calls: int = 60, rounds: int = 15) -> float:
    """Seconds of host work a call while the device is busy with something else; median of the rounds.

    So few calls that no queue fills up.
    """

    if not GPU:
        calls, rounds = 2, 1

    def one_round() -> float:
        if GPU:
            torch.cuda._sleep(50 * CYCLES)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - started
        finish()
        return spent / calls

    for _ in range(2):
        one_round()
    return statistics.median(one_round() for _ in range(rounds))


def memset(tensor: torch.Tensor) -> Call:
    """Fills a tensor by the device's own memset."""
    if not GPU:
        return tensor.zero_
    driver = ctypes.CDLL("libcuda.so.1")
    at, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        failure = driver.cuMemsetD8Async(at, ctypes.c_ubyte(1), size, stream)
        assert failure == 0, failure

    return call


def kernel_times(call: Call, calls: int = 20) -> dict[str, float]:
    """Microseconds of each kernel by torch's profiler: name to mean; empty where the profiler does not work."""
    if not GPU:
        return {}
    from torch.profiler import ProfilerActivity, profile

    call()
    finish()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(calls):
                call()
            finish()
        return {
            event.key[:60]: round(event.self_device_time_total / event.count, 2)
            for event in found.key_averages()
            if event.self_device_time_total
        }
    except RuntimeError as error:
        return {f"profiler: {str(error).splitlines()[0]}": 0.0}
