"""The emulator itself: correct kernels pass under every seed, and the mistake in each incorrect one is found."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIZES = [0, 1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 5000]
RIGHT = ["block_reduce", "scan", "warp_reduce", "count_odd", "count_threads", "lock_without_sleep", "intrinsics"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile(out, *flags):
    command = ["g++", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def load(path):
    library = ctypes.CDLL(str(path))
    library.simt_run.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    library.simt_trace.argtypes = [ctypes.c_uint64]
    library.simt_trace.restype = ctypes.c_uint64
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("simt") / "selftest.so"
    built = compile(path, "-fPIC", "-shared", str(HERE / "selftest.cpp"))
    assert built.returncode == 0, built.stderr
    return load(path)


@pytest.fixture(scope="module")
def every_access(tmp_path_factory):
    """The same kernels, built so that another thread may run at every access to memory."""
    folder = tmp_path_factory.mktemp("simt_access")
    built = compile(folder / "selftest.o", "-fPIC", "-fsanitize=thread", "-c", str(HERE / "selftest.cpp"))
    assert built.returncode == 0, built.stderr
    built = compile(folder / "selftest.so", "-shared", "-Wl,-z,defs", str(folder / "selftest.o"))
    assert built.returncode == 0, built.stderr
    return load(folder / "selftest.so")


def run(library, what, seed, n=1025):
    message = ctypes.create_string_buffer(4096)
    status = library.simt_run(what.encode(), seed, n, message, len(message))
    return status, message.value.decode()


def failures(library, what, seeds, n=1025):
    return [(status, message) for status, message in (run(library, what, seed, n) for seed in range(seeds)) if status]


@pytest.mark.parametrize("what", RIGHT)
def test_right(library, what):
    assert failures(library, what, 60) == []


@pytest.mark.parametrize("what", RIGHT)
def test_right_with_every_access_a_point(every_access, what):
    assert failures(every_access, what, 20) == []


@pytest.mark.parametrize("n", SIZES)
def test_right_sizes(library, n):
    assert failures(library, "scan", 25, n) == []
    assert failures(library, "block_reduce", 10, n) == []


# Kernels with a mistake: a pattern of the error ("": there is none, the result is wrong), and how many of 40 seeds at
# least must show it.
BROKEN = {
    "block_reduce_without_barrier": ("", 20),
    "scan_without_ticket": ("livelock.*__nanosleep.*blocks not started", 10),
    "warp_reduce_in_lockstep": ("", 20),
    "count_odd_wrong_mask": ("not in its own mask", 40),
    "shuffle_from_outside": (r"reads lane \d+, not in the mask", 40),
    "count_threads_without_atomic": ("", 15),
    "divergent_barrier": ("deadlock.*another barrier$", 40),
    "early_return": ("deadlock.*ended", 40),
    "wait_for_last_block": ("livelock.*blocks not started", 10),
    "too_much_stack": ("overflowed its stack", 40),
    "too_much_shared": ("bytes of shared memory", 40),
    "throws": ("^thrown by the kernel$", 40),
    "reads_poison": ("", 40),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken(library, what):
    pattern, least = BROKEN[what]
    found = failures(library, what, 40, 100 if what == "early_return" else 1025)
    assert len(found) >= least
    for status, message in found:
        if pattern:
            assert status == 2
            assert re.search(pattern, message), message
        else:
            assert status == 1, message


def test_message(library):
    """An error names the kernel, the block, the thread, the intrinsic it waits in, and the line."""
    _, message = run(library, "divergent_barrier", 3)
    assert message.startswith("kernel divergent_barrier (2 blocks of 64 threads, seed 3): deadlock: block ")
    assert message.count("__syncthreads (selftest.cpp:") == 2


def test_still_usable_after_an_error(library):
    for what in BROKEN:
        run(library, what, 1, 100)
        assert run(library, "scan", 1) == (0, "")


def test_race_of_plain_accesses(library, every_access):
    """A race between two plain accesses is found only where every access is a point at which another thread may run."""
    assert failures(library, "count_plainly", 20) == []
    assert len(failures(every_access, "count_plainly", 20)) >= 5


def test_same_seed_same_run(library):
    traces = [library.simt_trace(seed) for seed in range(30)]
    assert traces == [library.simt_trace(seed) for seed in range(30)]
    assert len(set(traces)) >= 25


def test_portable_switch(tmp_path):
    """With ucontext in place of the switch in fiber.h, the runs are the same."""
    program = tmp_path / "selftest"
    flags = [["-DSIMT_UCONTEXT"], []]
    outputs = []
    for each in flags:
        built = compile(program, *each, str(HERE / "selftest.cpp"))
        assert built.returncode == 0, built.stderr
        done = subprocess.run([program, "intrinsics", "divergent_barrier"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


def test_under_sanitizers(tmp_path):
    program = tmp_path / "selftest"
    # Kernels with a mistake add up poison, which overflows signed integers.
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=signed-integer-overflow"]
    built = compile(program, "-g", *flags, str(HERE / "selftest.cpp"))
    if "cannot find" in built.stderr:
        pytest.skip("no sanitizer libraries")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, *RIGHT, *BROKEN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12 * (len(RIGHT) + len(BROKEN))
    assert all(line.split(" ")[1] == "0" for line in lines if line.split(" ")[0] in RIGHT)
