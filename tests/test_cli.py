"""The command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan import __main__ as cli
from kvplan.inspect import doctor

ROOT = Path(__file__).resolve().parents[1]


def test_doctor_finds_what_is_needed(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("Python", "torch", "compiled extension", "Mooncake engine"):
        assert any(line.startswith("ok") and name in line for line in lines), name


def test_doctor_gives_a_fix_for_what_is_missing(capsys, monkeypatch):
    def broken():
        return doctor.Finding("torch", False, "No module named 'torch'", "pip install 'torch>=2.11'", needed=True)

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor._module("NoSuch", "no_such_module_", (), "pip install it")))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING torch" in out and "fix: pip install 'torch>=2.11'" in out and "fix: pip install it" in out
    assert cli.main(["doctor", "--json"]) == 1
    assert [f["usable"] for f in json.loads(capsys.readouterr().out)] == [False, False]


def test_doctor_runs_where_the_extension_or_torch_is_missing(tmp_path):
    shutil.copytree(ROOT / "kvplan", tmp_path / "kvplan", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-m", "kvplan", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "MISSING compiled extension" in done.stdout and not done.stderr
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "MISSING torch" in done.stdout and "fix: pip install 'torch>=2.11'" in done.stdout


def test_every_public_name_is_there():
    import kvplan

    assert all(getattr(kvplan, name) is not None for name in kvplan.__all__)
    assert set(kvplan.__all__) <= set(dir(kvplan))


def test_help_is_enough(capsys):
    for command in ("demo", "doctor"):
        done = subprocess.run([sys.executable, "-m", "kvplan", command, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "--" in done.stdout


def test_version(capsys):
    import kvplan

    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"kvplan {kvplan.__version__}\n"
