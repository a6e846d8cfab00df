"""Builds kvplan/_C.so with CMake, against the torch that is installed: pip install --no-build-isolation ."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from setuptools import Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext
except ImportError as error:
    sys.exit(f"kvplan is built with setuptools 77 or newer ({error}). Type: pip install 'setuptools>=77' wheel")

ROOT = Path(__file__).resolve().parent


def torch_root() -> Path:
    """Folder of the installed torch; found without importing it, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "missing() was not asked"
    return Path(spec.origin).parent


def missing() -> list[str]:
    """A line for each thing that the build needs and that is not here, with what to type."""
    lines = []
    if importlib.util.find_spec("torch") is None:
        lines.append(
            "torch: kvplan is built against the torch that is installed, and none is. Type: pip install 'torch>=2.11'. "
            "Then: pip install --no-build-isolation ."
        )
    else:
        version = importlib.metadata.version("torch")
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 11):
            lines.append(f"torch: 2.11 or newer is needed, this is {version}. Type: pip install 'torch>=2.11'")
    if shutil.which("cmake") is None:
        lines.append("cmake: it builds the extension. Type: apt-get install -y cmake, or pip install cmake")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++").split()[0], "c++", "g++", "clang++")):
        lines.append("a C++ compiler: Type: apt-get install -y g++")
    return lines


class CMakeBuild(build_ext):
    """Runs CMake in place of the compiler."""

    def run(self) -> None:
        if lines := missing():
            sys.exit("kvplan cannot be built. Missing are:\n" + "".join(f"  {line}\n" for line in lines))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", ROOT, "-B", build, f"-DTORCH_ROOT={torch_root()}", f"-DOUTPUT_DIR={output}"]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run([*configure, "-DCMAKE_BUILD_TYPE=Release"], check=True)
        subprocess.run(["cmake", "--build", build, "--target", "_C", "-j", jobs], check=True)
        package = ROOT / "kvplan"
        if (self.editable_mode or self.inplace) and output != package:
            # setuptools takes the extension alone to the source folder.
            (package / "kernels.fatbin").unlink(missing_ok=True)
            if (output / "kernels.fatbin").exists():
                shutil.copy(output / "kernels.fatbin", package)

    def get_ext_filename(self, fullname: str) -> str:
        # No Python symbol inside, so no Python version in the name.
        return str(Path(*fullname.split("."))) + ".so"


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("kvplan._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
