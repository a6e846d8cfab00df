"""Builds kvplan/_C.so with CMake, against the torch that is installed: pip install --no-build-isolation ."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def torch_root() -> Path:
    """Folder of the installed torch; found without importing it, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            "kvplan is built against the installed torch, and none was found. Install torch>=2.11 first, then run "
            "pip install --no-build-isolation ."
        )
    return Path(spec.origin).parent


class CMakeBuild(build_ext):
    """Runs CMake in place of the compiler."""

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
