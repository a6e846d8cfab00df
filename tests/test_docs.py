"""Every Python block of README.md and docs/ runs: as the page shows it, or by the test that it names.

A page's blocks share a namespace, and run in their order in a process of their own. HTML comments, which readers do
not see, say what else there is to do:

<!-- setup ... -->        Python that runs here, before what follows
<!-- check ... -->        the same: what the blocks before it must have done
<!-- file: NAME -->       the next block is a program of this name
<!-- run: NAME NAME -->   programs of this page run beside each other, the first one first; all must end well
<!-- run by: tests/FILE::TEST -->   the next block lists calls, or needs what is not here; this test makes the calls
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine_peer import need

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A comment, with what it holds; or a block, with its language.
PART = re.compile(r"^<!-- (setup|check|file:|run:|run by:)(.*?)-->$|^```(\w*)\n(.*?)^```$", re.M | re.S)

# Pages whose blocks list calls of a program that stands elsewhere: the test that makes them, block by block.
ELSEWHERE = {
    "packing.md": ["tests/test_staging.py::test_random_plans_arrive_packed_as_they_do_directly"],
    "engines.md": [
        "tests/test_engines.py::test_read_pulls_pages_from_the_peer",
        "tests/test_settling.py::test_quarantine_gives_pages_back_once_and_when_settled",
    ],
    "upgrade.md": ["tests/test_engines.py::test_a_transfer_that_was_waited_for_too_briefly_goes_on"],
}


def parts_of(page: Path) -> list[tuple[str, str, str]]:
    """(kind, argument, code) of what is to be done, in order: kind is python, file, run or elsewhere."""
    elsewhere = iter(ELSEWHERE.get(page.name, []))
    parts, mark = [], ("", "")
    for kind, text, language, code in PART.findall(page.read_text()):
        if kind in ("setup", "check"):
            parts.append(("python", "", text))
        elif kind == "run:":
            parts.append(("run", text.strip(), ""))
        elif kind:
            mark = (kind, text.strip())
        elif language == "python":
            if page.name in ELSEWHERE:
                mark = ("run by:", next(elsewhere, "no test is named for this block"))
            named = {"": "python", "file:": "file", "run by:": "elsewhere"}[mark[0]]
            parts.append((named, mark[1], code))
            mark = ("", "")
    return parts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path):
    parts = parts_of(page)
    for kind, test, _ in parts:
        if kind == "elsewhere":
            file, name = test.split("::")
            assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{page.name}: there is no test {test}"
    for name, code in [part[1:] for part in parts if part[0] == "file"]:
        (tmp_path / name).write_text(code)
    code = "".join(code + "\n" for kind, _, code in parts if kind == "python")
    if code:
        (tmp_path / "blocks_of_the_page.py").write_text(code)
        run_beside_each_other(["blocks_of_the_page.py"], tmp_path)
    for names in [names.split() for kind, names, _ in parts if kind == "run"]:
        need("mooncake")
        run_beside_each_other(names, tmp_path)
    assert not any(kind == "file" for kind, *_ in parts) or any(kind == "run" for kind, *_ in parts)


def run_beside_each_other(names: list[str], folder: Path) -> None:
    """Start the programs, each once the one before it has said something, and wait for all to end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = os.environ | {"PORT": str(free.getsockname()[1]), "PYTHONPATH": str(ROOT)}
    running: list[subprocess.Popen[str]] = []
    try:
        for name in names:
            if running and running[-1].stdout is not None:
                running[-1].stdout.readline()
            command = [sys.executable, "-u", name]
            running.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
        for name, process in zip(names, running, strict=True):
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{out[-2000:]}\n{errors[-4000:]}"
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_every_page_is_reached_by_the_site():
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if page.relative_to(ROOT / "docs").as_posix() not in listed] == []


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
