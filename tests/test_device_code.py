"""Device code compiles, ahead of use and at first use, and stays in registers. No GPU is needed."""

import re
import shutil
import subprocess

import pytest

from kvplan.ops import kernels

ROOT = kernels.FATBIN.parent.parent
KERNELS = sorted(re.findall(r"KVPLAN_KERNEL(?:_OF\(\d\))? (kvplan_\w+)\(", "".join(kernels.sources().values())))
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]


def test_every_kernel_is_known_to_the_code_that_launches_it():
    names = re.search(r"kKernelNames\[\] = \{(.*?)\}", kernels.sources()["launch.h"], re.DOTALL)
    assert sorted(re.findall(r'"(\w+)"', names[1])) == KERNELS


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nvcc_spills_nothing(capability, tmp_path):
    arch = "".join(map(str, capability))
    command = ["nvcc", "-std=c++17", "--cubin", f"-arch=sm_{arch}", "-Werror", "all-warnings", "-Xptxas", "-v"]
    source = ROOT / "csrc" / "cuda" / "kernels.cu"
    done = subprocess.run([*command, source, "-o", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = re.findall(
        r"Function properties for (\w+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", done.stderr
    )
    assert sorted(name for name, *_ in report) == KERNELS
    assert {tuple(map(int, sizes)) for _, *sizes in report} == {(0, 0, 0)}, report
    print(*re.findall(r"Compiling entry function '(\w+)'|Used (\d+ registers[^\n]*)", done.stderr), sep="\n")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_build_with_nvcc_has_kernels():
    assert kernels.FATBIN.stat().st_size > 10_000


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nvrtc_compiles_the_same_files(capability, tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin = kernels.compiled(capability)
    assert all(name.encode() in cubin for name in KERNELS)
    monkeypatch.setattr(kernels, "_compile", None)
    assert kernels.compiled(capability) == cubin  # kept


def test_nvrtc_says_what_it_does_not_compile(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "sources", lambda: {"kernels.cu": "int main( {"})
    with pytest.raises(RuntimeError, match=r"kernels\.cu\(1\): error"):
        kernels.compiled((9, 0))
