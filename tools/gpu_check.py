"""make gpu-check: builds kvplan, tests every back end on the GPU, checks memory accesses, measures, and prints a table.

Needs no network and installs nothing: the Python that runs it has torch, pytest, hypothesis and NumPy, and Triton and
CuPy where those back ends are to be tested; cmake and g++ are on PATH, nvcc too where kernels are to be compiled ahead.
Everything is built in build/gpu. Status: 0 all is well, 1 something failed, 2 torch sees no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
PACKAGE = SITE / "kvplan"
LIMIT = 470.0  # seconds for everything
STARTED = time.monotonic()


@dataclass
class Step:
    """What one step came to: "passed", "failed", "out of time", or why it did not run."""

    name: str
    result: str
    seconds: float
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.result in ("failed", "out of time")


def left() -> float:
    return LIMIT - (time.monotonic() - STARTED)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def run(name: str, command: list[str | Path], limit: float, **variables: str) -> tuple[Step, str]:
    """One step with a time limit; its output goes to build/gpu, and is shown where the step fails."""
    limit = min(limit, left())
    if limit < 5:
        return Step(name, "out of time", 0.0), ""
    say(f"{name}: at most {limit:.0f} s")
    log = BUILD / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as file:
        # A session of its own, so that a step out of time ends with all that it started.
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**environment(), **variables}, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = None
    output = log.read_text(errors="replace")
    result = "out of time" if status is None else "failed" if status else "passed"
    if result != "passed":
        print(output[-6000:], flush=True)
    return Step(name, result, time.monotonic() - began), output


def environment() -> dict[str, str]:
    """The built package comes first, and the source tree, whose kvplan is not built, is found for `bench` alone."""
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{key: value for key, value in os.environ.items() if key not in ("KVPLAN_BACKEND", "KVPLAN_GPU_DRY")},
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # not the folder that it is started in
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(BUILD / "cache"),
        "TRITON_CACHE_DIR": str(BUILD / "triton"),
    }


def build() -> Step:
    """The extension and the kernels, into a folder that links to the sources: as an editable install would have it."""
    import_torch = importlib.util.find_spec("torch")
    assert import_torch is not None and import_torch.origin is not None
    PACKAGE.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (ROOT / "kvplan").iterdir() if path.suffix not in (".so", ".fatbin")]
    for source in [*sources, ROOT / "triton_kernels", ROOT / "csrc"]:
        link = PACKAGE / source.name
        if source.name != "__pycache__" and not link.exists():
            link.symlink_to(source)
    objects = BUILD / "objects"
    configure = ["cmake", "-S", ROOT, "-B", objects, f"-DTORCH_ROOT={Path(import_torch.origin).parent}",
                 f"-DOUTPUT_DIR={PACKAGE}", "-DCMAKE_BUILD_TYPE=Release"]  # fmt: skip
    step, _ = run("configure", configure, 60)
    if step.failed:
        return step
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    made, _ = run("build", ["cmake", "--build", objects, "--target", "_C", "-j", jobs], 150)
    made.seconds += step.seconds
    if not (PACKAGE / "kernels.fatbin").exists():
        made.detail = "without nvcc: no back end 'cuda'"
    return made


def backends() -> dict[str, str]:
    """Each back end, and why it cannot be tested here, or nothing."""
    reasons = {"cuda": "" if (PACKAGE / "kernels.fatbin").exists() else "not here: no nvcc"}
    for name, module in (("cupy", "cupy"), ("triton", "triton")):
        reasons[name] = "" if importlib.util.find_spec(module) is not None else f"not here: {module} is not installed"
    return reasons


def tests(backend: str) -> Step:
    """tests/gpu with one back end forced."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", "-ra", "--tb=short",
               "--durations=5"]  # fmt: skip
    step, output = run(f"tests: {backend}", command, 90, KVPLAN_BACKEND=backend)
    counts = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    step.detail = counts[-1] if counts else ""
    if step.result == "passed" and "passed" not in step.detail:
        step.result = "failed"  # nothing ran
    print("\n".join(line for line in output.splitlines() if line.startswith(("SKIPPED", "FAILED", "ERROR", "XFAIL"))))
    return step


def sanitizer(tool: str, backend: str) -> Step:
    """Small inputs under a memory checker, where it works on this machine."""
    name = f"{tool}: {backend}"
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(checker).exists():
        return Step(name, "not here", 0.0, "no compute-sanitizer")
    under = [checker, "--tool", tool, "--error-exitcode", "9"]
    # A kernel of torch's: what fails here is not kvplan's fault.
    probe = "import torch; assert float(torch.ones(3, device='cuda').sum()) == 3; print('it works')"
    tried, output = run(f"{name}, does it work", [*under, sys.executable, "-c", probe], 40)
    if "it works" not in output or tried.failed:
        reason = next((line.strip("= ") for line in output.splitlines() if "rror" in line or "support" in line), "")
        return Step(name, "not usable here", tried.seconds, reason[:80])
    step, output = run(
        name, [*under, sys.executable, "tests/gpu/small_inputs.py"], 60, KVPLAN_BACKEND=backend,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )  # fmt: skip
    if step.result == "passed" and "all right" not in output:
        step.result = "failed"
    summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    step.detail = summary[-1][:80] if summary else ""
    step.seconds += tried.seconds
    return step


def main() -> int:
    try:
        import torch
    except ImportError:
        print(f"{sys.executable} has no torch: say which Python does, as in: make gpu-check PYTHON=/path/to/python3")
        return 2
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} of {sys.executable} sees no GPU: nothing to check here. Nothing was built.")
        return 2
    say(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    steps = [build()]
    table = ""
    if not steps[0].failed:
        usable = backends()
        for backend, reason in usable.items():
            steps.append(Step(f"tests: {backend}", reason, 0.0) if reason else tests(backend))
        first = next((name for name, reason in usable.items() if not reason), None)
        if first is not None:
            steps += [sanitizer(tool, first) for tool in ("memcheck", "racecheck")]
        seconds = min(100.0, left() - 10)
        command: list[str | Path] = [sys.executable, "-m", "bench.gpu", "--seconds", f"{seconds:.0f}", "--out",
                                     BUILD / "results.json"]  # fmt: skip
        step, table = run("benchmark", command, seconds + 5)
        steps.append(step)
    print(f"\n{table}\n\n| step | result | seconds | |\n|---|---|---|---|")
    for step in steps:
        print(f"| {step.name} | {step.result} | {step.seconds:.0f} | {step.detail} |")
    failed = [step.name for step in steps if step.failed]
    say(f"failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
