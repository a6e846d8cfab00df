"""python -m kvplan doctor: what is installed and usable here, with the fix for what is not."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import dataclasses
import importlib
import importlib.metadata
import json
import platform
import shutil
import sys
import warnings
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `needed` marks what kvplan cannot work without."""

    name: str
    usable: bool
    detail: str
    fix: str = ""
    needed: bool = False


def _python() -> Finding:
    usable = sys.version_info >= (3, 10)
    return Finding("Python", usable, platform.python_version(), "install Python 3.10 or newer", needed=True)


def _torch() -> Finding:
    fix = "pip install 'torch>=2.11'"
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, str(error), fix, needed=True)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Finding("torch", version >= (2, 11), torch.__version__, fix, needed=True)


def _numpy() -> Finding:
    fix = "pip install 'numpy>=1.26'"
    try:
        import numpy
    except ImportError as error:
        return Finding("NumPy", False, str(error).splitlines()[0], fix, needed=True)
    version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    return Finding("NumPy", version >= (1, 26), numpy.__version__, fix, needed=True)


def _extension() -> Finding:
    fix = "in the source tree: pip install --no-build-isolation --editable . (needs g++ and cmake)"
    try:
        import torch

        from .. import ops

        if not ops.EXTENSION.exists():
            return Finding("compiled extension", False, f"{ops.EXTENSION.name} is missing", fix, needed=True)
        runs, cuts = ops.find_runs(*[torch.tensor([3, 4, 9])] * 2)
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:
        return Finding("compiled extension", False, str(error).splitlines()[0], fix, needed=True)
    works = runs[:, : int(cuts[-1])].tolist() == [[3, 9], [3, 9], [2, 1]]
    return Finding("compiled extension", works, str(ops.EXTENSION), fix, needed=True)


def _cuda() -> Finding:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("CUDA driver", False, "libcuda.so.1 is not here", "no GPU: plans are made on the CPU")
    import torch

    if not torch.cuda.is_available():
        return Finding("CUDA", False, f"torch {torch.__version__} sees no GPU", "install a CUDA build of torch")
    return Finding("CUDA", True, torch.cuda.get_device_name(0))


def _nvcc() -> Finding:
    path = shutil.which("nvcc")
    fix = "only needed to build kernels ahead of use: install the CUDA toolkit, or have CuPy compile them"
    return Finding("nvcc", path is not None, path or "not on PATH", fix)


def _module(name: str, module: str, distributions: tuple[str, ...], fix: str) -> Callable[[], Finding]:
    def look() -> Finding:
        versions = []
        for distribution in distributions:
            try:
                versions.append(f"{distribution} {importlib.metadata.version(distribution)}")
            except importlib.metadata.PackageNotFoundError:
                continue
        reason = ""
        for one in module.split():
            try:
                importlib.import_module(one)
            except (ImportError, OSError) as error:
                reason = str(error).splitlines()[0]
            else:
                return Finding(name, True, ", ".join(versions) or one)
        return Finding(name, False, reason, "apt-get install libibverbs1" if "libibverbs" in reason else fix)

    return look


def _backend(number: int, device: str) -> Callable[[], Finding]:
    """Who plans for tensors of a device, and why; `number` in `backend.chosen()`."""

    def look() -> Finding:
        name = f"plans on the {device}"
        try:
            from ..ops import backend

            choice = backend.chosen()[number]
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            return Finding(name, False, str(error).splitlines()[0])
        if choice.name is None:
            return Finding(name, False, choice.why)
        return Finding(name, True, f"by {choice.name}: {choice.why.splitlines()[0]}")

    return look


UNUSED = "nothing to do: this release of kvplan does not use it"

CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _numpy,
    _extension,
    _cuda,
    _nvcc,
    _module(
        "CuPy",
        "cupy",
        ("cupy-cuda12x", "cupy-cuda13x"),
        "only needed for a GPU without nvcc: pip install 'kvplan[cupy]'",
    ),
    _module("Triton", "triton", ("triton",), "only needed for a GPU without nvcc and CuPy: pip install triton"),
    _backend(0, "CPU"),
    _backend(1, "GPU"),
    _module(
        "Mooncake engine",
        "mooncake.engine",
        ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"),
        "pip install 'kvplan[mooncake]' (CUDA 12), 'kvplan[mooncake-cuda13]' or 'kvplan[mooncake-cpu]'",
    ),
    _module(
        "NIXL engine",
        "nixl nixl_cu13 nixl_cu12",
        ("nixl", "nixl-cu12", "nixl-cu13"),
        "pip install 'kvplan[nixl]' (CUDA 12) or 'kvplan[nixl-cuda13]'; without a GPU: pip install --no-deps nixl-cu12",
    ),
    _module("Ascend engine", "memfabric_hybrid", ("memfabric_hybrid",), "pip install 'kvplan[ascend]'"),
)


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what would be warned of is in the report
        return [check() for check in CHECKS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 where something is missing that kvplan cannot work without."""
    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.usable else 'MISSING' if finding.needed else 'absent '} "
                  f"{finding.name:<20} {finding.detail}")  # fmt: skip
            if not finding.usable and finding.fix:
                print(f"        {'':<20} fix: {finding.fix}")
    return int(any(finding.needed and not finding.usable for finding in findings))
