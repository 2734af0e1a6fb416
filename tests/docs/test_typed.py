"""The annotations, as a type checker sees them in a program that uses an installed longshore."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT

SOURCE = ROOT / "src" / "longshore"
PROGRAMS = sorted((ROOT / "tests" / "typed_programs").glob("*.py"))

WRONG = """\
from torch import nn

import longshore
from longshore.engine.config import LossScaling

model = nn.Linear(2, 2)
longshore.AdamW(model.parameters(), learning_rate=1.0)
longshore.AdmaW(model.parameters())
longshore.Muon(model.parameters()).clip_grad_norm_("1.0")
longshore.Offload(tiles=1)
longshore.Config(gradient_cliping=1.0)
LossScaling(scale="large")
longshore.load("folder", model).epoch
longshore.initialize(model=model).engine.backward("loss")
longshore.initialize(model=model).optimizer.host_bytes("state")
"""
"""A program in which every line that follows the one of the model is an error."""
WRONG_LINES = set(range(WRONG.splitlines().index("model = nn.Linear(2, 2)") + 2, len(WRONG.splitlines()) + 1))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_run(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs and ``wrong.py`` in a project that is not this one.

    Its environment, ``venv``, has the package as a wheel has it: in ``site-packages``, where annotations count only
    because of ``py.typed``, and types are not inferred from the bodies of functions.
    """
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv")
    packages = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    shutil.copytree(SOURCE, packages / "longshore", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    others = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    for program in PROGRAMS:
        shutil.copy(program, folder / program.name)
    (folder / "wrong.py").write_text(WRONG)
    return folder


@pytest.fixture(scope="module")
def diagnostics(project: Path) -> list[dict[str, Any]]:
    """What pyright says of them in strict mode."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install -e '.[lint]'")
    settings = {
        "typeCheckingMode": "strict",
        "venvPath": ".",
        "venv": "venv",
        "exclude": ["venv"],
        "pythonVersion": "3.10",
    }
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(project)]
    environ = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(PROGRAMS) + 1
    return found["generalDiagnostics"]


def test_a_users_programs_have_no_errors(diagnostics: list[dict[str, Any]]) -> None:
    assert len(PROGRAMS) >= 5
    found = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']} ({each.get('rule')})"
        for each in diagnostics
        if not each["file"].endswith("wrong.py")
    ]
    assert found == []


def test_mistakes_are_found(diagnostics: list[dict[str, Any]]) -> None:
    """Otherwise the programs above have no errors because longshore's names have no types."""
    found = {each["range"]["start"]["line"] + 1 for each in diagnostics if each["file"].endswith("wrong.py")}
    assert found == WRONG_LINES


@pytest.mark.slow
def test_mypy_says_the_same(project: Path) -> None:
    """In strict mode. It has no words for a program that calls an untyped function of torch."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[lint]'")
    there = project / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-calls", "--python-executable", str(there)]
    names = [*(each.name for each in PROGRAMS), "wrong.py"]
    done = subprocess.run([*command, *names], cwd=project, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)
    assert {int(line) for name, line in errors if name == "wrong.py"} == WRONG_LINES, done.stdout
    assert [name for name, _ in errors if name != "wrong.py"] == [], done.stdout


def test_what_is_ignored_is_torchs() -> None:
    for program in PROGRAMS:
        for comment in re.findall(r"# (?:pyright|type): ?ignore.*", program.read_text()):
            assert comment.endswith("# torch has no annotations there"), f"{program.name}: {comment}"


def test_the_marker_is_part_of_the_package() -> None:
    """Wheels have all files of ``src/longshore``, and so has what is installed here, if it is not editable."""
    assert (SOURCE / "py.typed").read_text() == ""
    assert 'wheel.packages = ["src/longshore"]' in (ROOT / "pyproject.toml").read_text()
    installed = importlib.metadata.distribution("longshore")
    if json.loads(installed.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable") is not True:
        assert "longshore/py.typed" in {str(each) for each in installed.files or ()}
