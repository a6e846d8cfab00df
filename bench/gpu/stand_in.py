"""Where there is no GPU, to try the benchmark out: a back end's own kernels serve CPU tensors in this process.

"cuda" and "cupy": the CUDA kernels in the emulator of tests/simt. "triton": Triton's interpreter. "cpu": C++.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kvplan import ops as served  # first: it registers the ops that are replaced here

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "KVPLAN_BENCH_EMULATOR"
_registered: list[torch.library.Library] = []  # a registration ends with its Library


def use(name: str) -> None:
    """Have `plan_` and `copy_` of CPU tensors done by a back end's kernels."""
    assert served.plan_ is not None
    if name == "cpu":
        return
    if name == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        sys.path.append(str(ROOT))
        module = importlib.import_module("triton_kernels")
        functions = {"plan_": module.plan_, "copy_": module.copy_}
    else:
        emulator = Emulator()
        functions = {"plan_": emulator.plan_, "copy_": emulator.copy_}
    library = torch.library.Library("kvplan", "IMPL")
    for op, function in functions.items():
        library.impl(op, function, "CPU", allow_override=True)
    _registered.append(library)


def build(folder: Path) -> Path:
    """The emulator as a library in this folder; VARIABLE names one that is built."""
    source, library = ROOT / "tests" / "simt" / "kernels.cpp", folder / "kernels.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-DKVPLAN_SIMT", f"-I{source.parent}"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return library


class Emulator:
    """The kernels and their launches, on the CPU; threads take turns in another order each call."""

    def __init__(self) -> None:
        kept = os.environ.get(VARIABLE)
        with tempfile.TemporaryDirectory() as folder:
            self._library = ctypes.CDLL(str(kept or build(Path(folder))))
        self._seeds = itertools.count()

    def _call(self, name: str, *args: object) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        failure = function(ctypes.c_int64(next(self._seeds)), *map(_argument, args))
        if failure is not None:
            raise RuntimeError(failure.decode())

    def plan_(
        self, tables: torch.Tensor, job: torch.Tensor, pages: torch.Tensor, sizes: Sequence[int], table: torch.Tensor,
        info: torch.Tensor,
    ) -> None:  # fmt: skip
        segments = (info.numel() - 6) // sizes[0] if sizes[0] else 0
        wide = pages.dtype == torch.int64
        self._call(
            "plan", tables, tables.numel(), job, torch.tensor(sizes), pages, wide, table, table.shape[1], info, segments
        )

    def copy_(
        self, table: torch.Tensor, count: torch.Tensor | None, read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor], homes: Sequence[int],
    ) -> None:  # fmt: skip
        if any(tensor.data_ptr() != home for tensor, home in zip([*read, *written], homes, strict=True)):
            raise RuntimeError("the stand-in copies nothing that has been moved")
        self._call("copy", table, table.shape[1], count, None, 0, 0)


def _argument(arg: object) -> object:
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, bool):
        return ctypes.c_bool(arg)
    return ctypes.c_void_p(None) if arg is None else ctypes.c_int64(arg)  # type: ignore[arg-type]
