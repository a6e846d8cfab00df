"""make gpu-check: builds kvplan, tests every back end on the GPU, measures, checks memory accesses, and prints a table.

Needs no network and installs nothing: the Python that runs it has torch, pytest, hypothesis and NumPy, and Triton and
CuPy where those back ends are to be tested; cmake and g++ are on PATH, nvcc too where kernels are to be compiled ahead.

One deadline holds for everything. The folder of --out has table.md and results.json, whole at any moment and written
anew after each step and each figure, a log of each step and JUnit XML of the tests. What is most telling comes first.

--rehearse needs no GPU: each back end's benchmark runs over the emulator, Triton's interpreter or CPU tensors.

Status: 0 all is well, 1 something failed, 2 torch sees no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from bench.gpu import children  # noqa: E402  (found by the path above)
from bench.gpu.report import BEGUN, NOT_BEGUN, Report, Step  # noqa: E402

CORE_TESTS = ("tests/gpu/test_device_plans.py", "tests/gpu/test_device_execute.py")
COMPILE_TESTS = "tests/gpu/test_device_compile.py"


class Check:
    """All steps, against one deadline."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + 60 * args.minutes - 2  # two seconds to tell in
        self.core = args.minutes < 5 and not args.rehearse
        self.minutes: float = args.minutes
        self.rehearse: bool = args.rehearse
        self.out: Path = args.out.resolve()
        self.site = self.out / "site"
        self.package = self.site / "kvplan"
        self.report = Report(self.out)
        self.steps: list[tuple[Step, Callable[[], str]]] = []
        self._plan(args.backends)

    def _plan(self, asked: list[str] | None) -> None:
        """Which steps there will be, in order. All are in the report before the first begins."""
        if self.rehearse:
            names = asked or ["cpu", "cuda", *(["triton"] if importlib.util.find_spec("triton") else [])]
            reasons = dict.fromkeys(names, "")
            self._add("build", self.build_emulator if "cuda" in names or "cupy" in names else self.build_nothing)
        else:
            names = asked or ["cuda", "triton", "cupy"]
            reasons = {name: self._lacking(name) for name in names}
            self._add("build", self.build)
        main = next((name for name in names if not reasons[name]), names[0])
        main_tests = list(CORE_TESTS) if self.core else ["tests/gpu", f"--ignore={COMPILE_TESTS}"]
        parts = children.CORE if self.core else children.PARTS
        for name in names:
            reason = reasons[name]
            if self.core and name != main:
                continue
            if reason:
                self._add(f"tests: {name}", lambda reason=reason: reason)
                continue
            if name == "cupy" and main == "cuda":
                # The same source as "cuda": what can differ is the compiler and the loading.
                self._add("smoke: cupy", lambda: self.smoke("cupy"))
                continue
            limit, keep = (150.0, 75.0) if name == main else (120.0, 45.0)
            if not self.rehearse:
                self._add(f"tests: {name}", lambda n=name, s=limit, k=keep: self.tests(n, main_tests, s, k))
            last = 100.0 if name == main else 60.0
            self._add(f"benchmark: {name}", lambda n=name, s=last: self.benchmark(n, parts, s))
        if self.rehearse:
            self._add("tests: cpu", lambda: self.tests("cpu", main_tests, 600.0, 0.0))
        if self.minutes >= 3 and not self.core:
            self._add(f"compile: {main}", lambda: self.tests(main, [COMPILE_TESTS], 100.0, 45.0, kind="compile"))
            self._add(f"memcheck: {main}", lambda: self.memcheck(main))

    def _add(self, name: str, call: Callable[[], str]) -> None:
        self.steps.append((Step(name), call))
        self.report.steps.append(self.steps[-1][0])

    def _lacking(self, name: str) -> str:
        """Why a back end cannot be tested here, or nothing."""
        if name == "cuda":
            tried = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
            tried += [f"{os.environ[key]}/bin/nvcc" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
            return "" if any(path and Path(path).exists() for path in tried) else "not here: no nvcc"
        return "" if importlib.util.find_spec(name) is not None else f"not here: {name} is not installed"

    # ---------------------------------------------------------------------------------------------------------- steps

    def until(self, seconds: float, keep: float) -> float:
        """When a step ends at the latest. In a rehearsal each has an equal share of what is left."""
        now = time.monotonic()
        if self.rehearse:
            waiting = [step for step, _ in self.steps if not step.name.startswith("memcheck")]  # it needs none
            to_come = sum(step.result in (NOT_BEGUN, BEGUN) for step in waiting)
            return now + (self.deadline - now) / to_come
        return min(now + seconds, self.deadline - keep)

    def run(
        self, name: str, command: list[str | Path], seconds: float, keep: float, **variables: str
    ) -> tuple[str, str]:
        """(result, output). At most so many seconds, and `keep` of them are left for what comes behind."""
        until = self.until(seconds, keep)
        if until - time.monotonic() < 3:
            return "no time was left", ""
        log = self.out / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".log")
        status = children.stream(["env", "-C", ROOT, *command], log, until, {**self.environment(), **variables})
        output = log.read_text(errors="replace")
        result = "out of time" if status is None else "failed" if status else "passed"
        if result != "passed":
            print(output[-4000:], flush=True)
        return result, output

    def environment(self) -> dict[str, str]:
        """The built package comes first; the source tree, whose kvplan is not built, is found for `bench` alone."""
        paths = [*([] if self.rehearse else [str(self.site)]), str(ROOT), os.environ.get("PYTHONPATH", "")]
        kept = {key: value for key, value in os.environ.items() if key not in ("KVPLAN_BACKEND", "KVPLAN_GPU_DRY")}
        if shutil.which("make") is None and "CMAKE_GENERATOR" not in kept:
            kept["CMAKE_GENERATOR"] = "Ninja"
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **({"KVPLAN_BENCH_EMULATOR": str(self.out / "kernels.so")} if (self.out / "kernels.so").exists() else {}),
            "PYTHONSAFEPATH": "1",  # not the folder that it is started in
            "PYTHONUNBUFFERED": "1",
            "XDG_CACHE_HOME": str(self.out / "cache"),
            "TRITON_CACHE_DIR": str(self.out / "triton"),
        }

    def forced(self, backend: str) -> dict[str, str]:
        return {"KVPLAN_GPU_DRY": "cpu"} if self.rehearse else {"KVPLAN_BACKEND": backend}

    def build(self) -> str:
        """The extension and the kernels, into a folder that links to the sources: as an editable install has it."""
        torch = importlib.util.find_spec("torch")
        assert torch is not None and torch.origin is not None
        self.package.mkdir(parents=True, exist_ok=True)
        sources = [path for path in (ROOT / "kvplan").iterdir() if path.suffix not in (".so", ".fatbin")]
        for source in [*sources, ROOT / "triton_kernels", ROOT / "csrc"]:
            link = self.package / source.name
            if source.name != "__pycache__" and not link.is_symlink():
                link.symlink_to(source)
        objects = self.out / "objects"
        keep = 75.0 if self.core else 200.0
        result, _ = self.run(
            "configure",
            ["cmake", "-S", ROOT, "-B", objects, f"-DTORCH_ROOT={Path(torch.origin).parent}",
             f"-DOUTPUT_DIR={self.package}", "-DCMAKE_BUILD_TYPE=Release"], 60, keep,
        )  # fmt: skip
        if result != "passed":
            return result
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        return self.run("build", ["cmake", "--build", objects, "--target", "_C", "-j", jobs], 150, keep)[0]

    def build_nothing(self) -> str:
        return "not here: the kvplan of this Python is rehearsed with"

    def build_emulator(self) -> str:
        code = f"from pathlib import Path; from bench.gpu import stand_in; stand_in.build(Path({str(self.out)!r}))"
        return self.run("build", [sys.executable, "-c", code], 60, 0)[0]

    def tests(self, backend: str, files: list[str], seconds: float, keep: float, kind: str = "tests") -> str:
        """Tests of tests/gpu with one back end forced."""
        name = f"{kind}: {backend}"
        command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-p", "no:cacheprovider", "-ra", "-vv",
                   "--tb=short", "--durations=5", f"--junitxml={self.out / f'{kind}-{backend}.xml'}"]  # fmt: skip
        result, output = self.run(name, command, seconds, keep, **self.forced(backend))
        counts = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
        passed, failed = (len(re.findall(rf" {word}\b", output)) for word in ("PASSED", "FAILED"))
        self.detail(name, counts[-1] if counts else f"{passed} passed, {failed} failed so far" if output else "")
        print("\n".join(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "XFAIL"))))
        if result == "passed" and not (counts and "passed" in counts[-1]) and not self.rehearse:
            return "failed"  # nothing ran
        return result

    def benchmark(self, backend: str, parts: tuple[str, ...], seconds: float) -> str:
        until = self.until(seconds, 0.0)
        if until - time.monotonic() < 3:
            self.report.figures[backend] = children.Figures(dict.fromkeys(parts, "no time was left"))
            return "no time was left"
        env = {**self.environment(), **({} if self.rehearse else self.forced(backend))}
        end = until if self.rehearse else self.deadline
        return children.measure(self.report, backend, parts, until, end, env, rehearse=self.rehearse)

    def smoke(self, backend: str) -> str:
        """Every kernel once or twice, on small inputs."""
        command: list[str | Path] = [sys.executable, "tests/gpu/small_inputs.py"]
        result, output = self.run(f"smoke: {backend}", command, 60, 30, **self.forced(backend))
        return "failed" if result == "passed" and "all right" not in output else result

    def memcheck(self, backend: str) -> str:
        """Small inputs under a memory checker, where it works on this machine."""
        name = f"memcheck: {backend}"
        checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if self.rehearse or not Path(checker).exists():
            return "not here: no GPU" if self.rehearse else "not here: no compute-sanitizer"
        under: list[str | Path] = [checker, "--tool", "memcheck", "--error-exitcode", "9"]
        # A kernel of torch's: what fails here is not kvplan's fault.
        probe = "import torch; assert float(torch.ones(3, device='cuda').sum()) == 3; print('it works')"
        tried, output = self.run(f"{name}, does it work", [*under, sys.executable, "-c", probe], 40, 0)
        if "it works" not in output or tried != "passed":
            reason = next((line.strip("= ") for line in output.splitlines() if "rror" in line or "support" in line), "")
            self.detail(name, reason[:80])
            return "not usable here" if tried != "no time was left" else tried
        result, output = self.run(
            name, [*under, sys.executable, "tests/gpu/small_inputs.py"], 90, 0, KVPLAN_BACKEND=backend,
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )  # fmt: skip
        summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
        self.detail(name, summary[-1][:80] if summary else "")
        return "failed" if result == "passed" and "all right" not in output else result

    # ------------------------------------------------------------------------------------------------------------ all

    def detail(self, name: str, text: str) -> None:
        next(step for step, _ in self.steps if step.name == name).detail = text

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def all(self, title: str) -> int:
        self.report.title = title
        self.report.write()
        self.say(title)
        try:
            for step, call in self.steps:
                began = time.monotonic()
                self.say(step.name)
                step.result = BEGUN
                self.report.write()
                step.result = call()
                step.seconds = time.monotonic() - began
                self.report.write()
                if step.name == "build" and step.failed:
                    break
        finally:
            print(f"\n{self.report.text()}\n", flush=True)
        failed = [step.name for step, _ in self.steps if step.failed]
        self.say(f"failed: {', '.join(failed)}" if failed else "nothing failed")
        return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all; under 5: the core alone")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder for table, logs and what is built"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--backends", nargs="+", choices=("cuda", "triton", "cupy", "cpu"), help="default: all")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        import torch
    except ImportError:
        print(f"{sys.executable} has no torch: say which Python does, as in: make gpu-check PYTHON=/path/to/python3")
        return 2
    if args.rehearse:
        return Check(args).all(f"REHEARSAL, no GPU: figures mean nothing. torch {torch.__version__}")
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} of {sys.executable} sees no GPU: nothing to check here. Nothing was built.")
        return 2
    return Check(args).all(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")


if __name__ == "__main__":
    sys.exit(main())
