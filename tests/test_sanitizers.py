"""The C++ core, and the CUDA kernels in the emulator, under AddressSanitizer and UBSan.

The extension is built anew with both (CMake's KVPLAN_SANITIZE) into build/sanitize, beside links to the package's
sources, and the tests of the core run against it in processes of their own, with the sanitizers loaded first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
HERE = ROOT / "tests" / "sanitize"
STAGES = ["properties", "plan", "runs", "descriptors", "pages", "copy", "device", "cases", "races"]
CORE = [f"tests/test_{name}.py" for name in STAGES]
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LIMIT = 300  # seconds for any process here


def runtime(name: str) -> Path | None:
    """A library of g++'s, or None where it is not installed."""
    if shutil.which("g++") is None:
        return None
    told = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    return Path(told).resolve() if Path(told).is_absolute() else None


# The C++ library too: the sanitizer looks up its throw when it is loaded, which is before Python loads any C++.
RUNTIMES = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in RUNTIMES or shutil.which("cmake") is None, reason="needs g++'s sanitizers, and cmake"),
]


def environment(**more: object) -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, RUNTIMES)),
        # Python and torch keep much to the end that they never free, and kvplan its blocks: no leak would stand out.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object a block of its own
        "PYTHONPATH": os.pathsep.join([str(BUILD / "site"), str(ROOT / "tests")]),
        "PYTHONSAFEPATH": "1",  # not the folder it is started in, where another kvplan is
        "PYTHONDONTWRITEBYTECODE": "1",
        **{key: str(value) for key, value in more.items()},
    }


@pytest.fixture(scope="module")
def package() -> Path:
    """kvplan with a sanitized extension."""
    package = BUILD / "site" / "kvplan"
    package.mkdir(parents=True, exist_ok=True)
    for link in [path for path in package.iterdir() if path.is_symlink()]:
        link.unlink()
    for source in [*(ROOT / "kvplan").iterdir(), ROOT / "triton_kernels", ROOT / "csrc"]:
        if source.suffix not in (".so", ".fatbin") and source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    configure = ["cmake", "-S", ROOT, "-B", BUILD / "objects", f"-DTORCH_ROOT={Path(torch.origin).parent}",
                 f"-DOUTPUT_DIR={package}", "-DKVPLAN_SANITIZE=ON"]  # fmt: skip
    for command in (configure, ["cmake", "--build", BUILD / "objects", "--target", "_C", "-j", str(os.cpu_count())]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return package


@pytest.fixture(scope="module")
def pytests(package):
    """Runs of pytest, all at once: name -> (status, output)."""
    runs = {
        "core": (CORE, {"KVPLAN_EXAMPLES": 15}),
        "packing": (["tests/test_packed.py"], {"KVPLAN_EXAMPLES": 15}),
        "ops": ([HERE / "ops.py"], {"KVPLAN_EXAMPLES": 100}),
        "kernels": ([HERE / "kernels.py"], {"KVPLAN_EXAMPLES": 10, "KVPLAN_SIMT_SEEDS": 1}),
    }

    def run(files, variables):
        # --capture=sys leaves the sanitizers' reports on stderr.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", "-x", *map(str, files)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(run, *run_of) for name, run_of in runs.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", ["core", "packing", "ops", "kernels"])
def test_no_fault_in(pytests, name):
    status, output = pytests[name]
    report = re.search(r"^.*(runtime error|ERROR: AddressSanitizer).*(\n.*){0,12}", output, re.MULTILINE)
    assert status == 0, report[0] if report else output[-4000:]


def test_mistakes_in_the_loaded_extension_are_seen(package):
    done = subprocess.run(
        [sys.executable, HERE / "seen.py"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded, seen = json.loads(done.stdout.splitlines()[-1])
    assert loaded == [f"{package}/_C.so"]
    for mistake, told in (
        ("a_write_behind_a_block", "heap-buffer-overflow"),
        ("a_read_behind_a_block", "heap-buffer-overflow"),
        ("a_word_out_of_line", "runtime error: load of misaligned address"),
    ):
        status, report = seen[mistake]
        assert status != 0 and told in report and "csrc/" in report, (mistake, status, report)


# File, what stands there, the mistake in its place, and what is said of it.
BEHIND = "heap-buffer-overflow"
MISTAKES = {
    "none": ("cpu/pages.cpp", "", "", ""),
    "page end": ("cpu/pages.cpp", "std::min(start + page_size, slots.size)", "start + page_size", BEHIND),
    "run end": ("cpu/runs.cpp", "std::min(first + part, n); ++k", "std::min(first + part, n + 1); ++k", BEHIND),
    "table end": ("cpu/descriptors.cpp", "i < n; ++i) out[i] = value", "i <= n; ++i) out[i] = value", BEHIND),
    "difference": (
        "arith.h",
        "static_cast<uint64_t>(slot) - static_cast<uint64_t>(first)",
        "static_cast<uint64_t>(slot - first)",
        "signed integer overflow",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_sources_are_seen(mistake, tmp_path):
    file, right, wrong, told = MISTAKES[mistake]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    source = tmp_path / "csrc" / file
    text = source.read_text()
    assert right in text, f"{file} has changed: make this mistake anew"
    source.write_text(text.replace(right, wrong) if right else text)
    program = tmp_path / "core"
    build = [
        "g++",
        "-std=c++17",
        "-O1",
        "-g1",
        "-DKVPLAN_NO_CLONES",
        *FLAGS,
        f"-I{tmp_path / 'csrc'}",
        HERE / "core.cpp",
    ]
    done = subprocess.run([*build, "-o", program], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}  # no torch here
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=LIMIT)
    if mistake == "none":
        assert (done.returncode, done.stdout) == (0, f"6 1 {4096 + 7 * 64 + 8192 + 11 * 128 + 64}\n"), done.stderr
    else:
        assert done.returncode != 0 and told in done.stderr, done.stdout + done.stderr
