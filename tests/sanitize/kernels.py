"""The CUDA kernels in the emulator (tests/simt) under AddressSanitizer and UBSan: run by tests/test_sanitizers.py.

Memory that is handed to a kernel is a block of its own, here or in torch, so that what leaves it is seen.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

# The same tests; they take the emulator that is defined here.
from simt.test_kernels import *  # noqa: F403
from simt.test_kernels import HERE, Emulator

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1", "-g1"]
FLAGS += ["-fno-sanitize=nonnull-attribute"]  # the emulator fills nothing at nullptr


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    library: Path = tmp_path_factory.mktemp("simt") / "kernels.so"
    flags = ["-std=c++17", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-DKVPLAN_SIMT", f"-I{HERE}", *FLAGS]
    subprocess.run(["g++", *flags, HERE / "kernels.cpp", "-o", library], check=True)
    return Emulator(library)
