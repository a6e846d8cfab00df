"""The Triton back end, for each release: its own tests in the interpreter, and every kernel compiled for GPUs that need
not be here. KVPLAN_TRITON names the folders that releases are installed in, as `make test` does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = [Path(folder).absolute() for folder in os.environ.get("KVPLAN_TRITON", "").split(os.pathsep) if folder]
RELEASES: list[Path | None] = [*FOLDERS] or [None]  # None: whatever is installed

TARGETS = {"cuda": ("cuda", "90", "32"), "hip": ("hip", "gfx942", "64")}

pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name if release else "installed")


def run(release: Path | None, *command: str, **variables: str) -> str:
    """Python with that release, from the root of the source tree; fails the test where it fails."""
    if release is None and find_spec("triton") is None:
        pytest.skip("Triton is not installed, and KVPLAN_TRITON names no folder with it")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if release is not None:
        assert [d for d in distributions(path=[str(release)]) if d.name == "triton"], f"no Triton in {release}"
        env["PYTHONPATH"] = os.pathsep.join([str(release), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command], env={**env, **variables}, cwd=HERE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_same_results_in_the_interpreter(release: Path | None) -> None:
    found = run(release, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted"), TRITON_INTERPRET="1")
    assert " passed" in found, found


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_kernel_compiles_and_stays_in_registers(release: Path | None, target: str, tmp_path: Path) -> None:
    script = HERE / "interpreted" / "compile_kernels.py"
    print(run(release, str(script), *TARGETS[target], TRITON_CACHE_DIR=str(tmp_path)))
