"""Selects the back end for each device: which kernels serve its tensors, and why.

CUDA tensors: kernels compiled when kvplan was built ("cuda"), else the same files compiled by NVRTC through CuPy
("cupy"), else Triton ("triton"), which also serves AMD's and Intel's GPUs. CPU tensors: C++ ("cpu"), else the slow
oracle ("reference"), with a warning. The environment variable KVPLAN_BACKEND names one to be used, or to fail.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import warnings
from pathlib import Path

import torch

from . import kernels, packing, plain

EXTENSION = Path(__file__).parents[1] / "_C.so"
GPU_BACKENDS = ("cuda", "cupy", "triton")
CPU_BACKENDS = ("cpu", "reference")
VARIABLE = "KVPLAN_BACKEND"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The back end for one kind of device; `name` is None where there is none. `why` is for people."""

    device: str
    name: str | None
    why: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    extension: bool  # kvplan/_C.so is there
    gpu: str | None  # "cuda", "hip" or "xpu": what torch can use here
    fatbin: bool  # kernels were compiled when kvplan was built
    cupy: bool
    triton: bool
    forced: str | None = None  # KVPLAN_BACKEND


def look(extension: Path) -> Facts:
    """The facts of this process and machine."""
    gpu = None
    if torch.cuda.device_count() > 0:  # unlike is_available, starts no CUDA, so that the process may fork later
        gpu = "hip" if torch.version.hip else "cuda"
    elif hasattr(torch, "xpu") and torch.xpu.is_available():
        gpu = "xpu"
    return Facts(
        extension=extension.exists(),
        gpu=gpu,
        fatbin=kernels.FATBIN.exists(),
        cupy=importlib.util.find_spec("cupy") is not None,
        triton=importlib.util.find_spec("triton") is not None,
        forced=os.environ.get(VARIABLE) or None,
    )


def choose(facts: Facts) -> tuple[Choice, Choice]:
    """(for CPU tensors, for GPU tensors).

    Raises:
        ValueError: KVPLAN_BACKEND is not one of the allowed values, or names a back end that cannot be used here.
    """
    forced = facts.forced
    if forced is not None and forced not in GPU_BACKENDS + CPU_BACKENDS:
        raise ValueError(f"{VARIABLE} is {forced!r}; it must be one of {', '.join(GPU_BACKENDS + CPU_BACKENDS)}")
    return _choose_cpu(facts), _choose_gpu(facts)


def _choose_cpu(facts: Facts) -> Choice:
    forced = facts.forced if facts.forced in CPU_BACKENDS else None
    if facts.extension and forced != "reference":
        return Choice("cpu", "cpu", f"{VARIABLE} says so" if forced else "the compiled extension is here")
    if forced == "cpu":
        raise ValueError(f"{VARIABLE} is 'cpu', but {_MISSING}")
    return Choice("cpu", "reference", f"{VARIABLE} says so" if forced else _MISSING)


_MISSING = (
    "the compiled extension kvplan/_C.so is missing: build it with 'pip install --no-build-isolation .' in the source "
    "tree (needs g++ and cmake). If that is done, you are in the source tree, which hides the installed package: leave "
    "this folder, or install with --editable"
)


def _choose_gpu(facts: Facts) -> Choice:
    forced = facts.forced if facts.forced in GPU_BACKENDS else None
    if facts.gpu is None:
        if forced is not None:
            raise ValueError(f"{VARIABLE} is {forced!r}, but torch {torch.__version__} sees no GPU")
        return Choice("gpu", None, f"torch {torch.__version__} sees no GPU")
    lacking = {
        "cuda": None if facts.fatbin else "no nvcc was there when kvplan was built",
        "cupy": None if facts.cupy else "CuPy is not installed",
        "triton": None if facts.triton else "Triton is not installed",
    }
    if facts.gpu != "cuda":
        lacking["cuda"] = lacking["cupy"] = "this GPU is not NVIDIA's"
    if not facts.extension:
        lacking = dict.fromkeys(lacking, "the compiled extension is missing")
    if forced is not None:
        if lacking[forced] is not None:
            raise ValueError(f"{VARIABLE} is {forced!r}, but {lacking[forced]}")
        return Choice(facts.gpu, forced, f"{VARIABLE} says so")
    usable = next((name for name, reason in lacking.items() if reason is None), None)
    passed = [f"{name}: {reason}" for name, reason in lacking.items() if reason is not None]
    if usable is not None:
        passed = passed[: list(lacking).index(usable)]
    return Choice(facts.gpu, usable, "; ".join(passed) or "the first choice, and it is here")


_choices: tuple[Choice, Choice] | None = None
_registered: list[torch.library.Library] = []  # a registration ends with its Library


def chosen() -> tuple[Choice, Choice]:
    """The back ends in use: (for CPU tensors, for GPU tensors)."""
    assert _choices is not None  # made when kvplan.ops was imported
    return _choices


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on a device, without waiting: pinned first, for a copy from pageable memory may wait."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def check_in_use(name: str, device_type: str) -> None:
    """That a back end asked for by name is the one in use for tensors of a device.

    Raises:
        ValueError: it is not; says how to have it.
    """
    if name not in GPU_BACKENDS + CPU_BACKENDS:
        raise ValueError(f"backend is {name!r}; it must be one of {', '.join(GPU_BACKENDS + CPU_BACKENDS)}")
    choice = chosen()[device_type != "cpu"]
    if choice.name != name:
        raise ValueError(
            f"backend is {name!r}, but {device_type} tensors are served by {choice.name!r} ({choice.why}); set "
            f"{VARIABLE}={name} before kvplan is imported"
        )


def register(extension: Path) -> None:
    """Give the ops their implementations; called once, when `kvplan.ops` is imported."""
    global _choices
    cpu, gpu = choose(look(extension))
    if extension.exists():
        torch.ops.load_library(extension)
    if cpu.name == "reference":
        warnings.warn(f"kvplan plans with its slow oracle: {cpu.why}", RuntimeWarning, stacklevel=2)
    if not extension.exists():
        _register_fallback()
    _register_packing(extension)
    if gpu.name in ("cuda", "cupy"):
        try:
            kernels.load(gpu.name)
        except (ImportError, RuntimeError) as error:
            gpu = _without(gpu, error)
    if gpu.name == "triton":
        _register_triton("XPU" if gpu.device == "xpu" else "CUDA")
    _choices = (cpu, gpu)


def _without(gpu: Choice, error: Exception) -> Choice:
    """The choice that is left where kernels did not load."""
    reason = str(error).splitlines()[0]
    if os.environ.get(VARIABLE) == gpu.name:
        raise RuntimeError(f"{VARIABLE} is {gpu.name!r}, but its kernels do not load: {reason}") from error
    if importlib.util.find_spec("triton") is None:
        warnings.warn(f"kvplan has no kernels for {gpu.device} tensors: {reason}", RuntimeWarning, stacklevel=3)
        return Choice(gpu.device, None, reason)
    return Choice(gpu.device, "triton", f"{gpu.name}: {reason}")


def _register_fallback() -> None:
    library = torch.library.Library("kvplan", "IMPL")
    for name in (
        "page_indices", "find_runs", "copy_", "plan", "plan_into", "prepare", "plan_", "check_pages", "expand",
        "first_collision",
    ):  # fmt: skip
        library.impl(name, getattr(plain, name, plain.missing), "CPU")
    _registered.append(library)


def _register_packing(extension: Path) -> None:
    """Torch ops do it on every device but the CPU, where they do it in place of the extension."""
    library = torch.library.Library("kvplan", "IMPL")
    for key in ("CUDA", "XPU", *([] if extension.exists() else ["CPU"])):
        library.impl("pack", packing.pack, key)
    _registered.append(library)


def _register_triton(key: str) -> None:
    # Loaded by name: its folder is at the top of the source tree, and Triton is only needed here.
    triton_kernels = importlib.import_module("kvplan.triton_kernels")
    library = torch.library.Library("kvplan", "IMPL")
    for name in ("plan_", "page_indices", "find_runs", "expand", "copy_"):
        library.impl(name, getattr(triton_kernels, name), key)
    _registered.append(library)
