"""No public name is removed or changed by the way: docs/public_api.txt is compared with the package."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from code_blocks import PAGES, ROOT, blocks_of

import longshore
from longshore.checkpoint.folder import VERSION
from scripts.docs import public_api
from scripts.docs.public_api import ADVICE, FILE, INTRODUCTION, MODULES, main, page
from scripts.docs.public_changes import Changes, allows, changes, sections_of

LINES = {line for lines in sections_of(FILE.read_text()).values() for line in lines}
NAMES = {re.split(r"\(|  ", line)[0] for line in LINES}


@pytest.mark.medium
def test_the_file_is_current() -> None:
    """In a process of its own: the list has what other tests define, too, if they define it first."""
    command = [sys.executable, "-m", "scripts.docs.public_api", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout or done.stderr


def test_the_file_has_what_is_exported() -> None:
    assert {f"longshore.{name}" for name in longshore.__all__} <= NAMES
    assert set(MODULES) <= NAMES
    assert {"TiledOptimizer.step", "longshore.Engine.save_checkpoint", "longshore.Engine.global_steps"} <= NAMES
    assert {"longshore train --lr", "zero_optimization.stage", "LONGSHORE_DEBUG"} <= NAMES
    private = [name for name in NAMES if re.search(r"\._(?!_)", name) or name.startswith("longshore.kernels")]
    assert private == []


def test_what_the_pages_use_is_public() -> None:
    used = set()
    pages = [path for path in PAGES if path.name != "adding_an_optimizer.md"]  # which is for work on longshore itself
    for block in (block for path in pages for block in blocks_of(path) if block.language == "python"):
        used |= {(block.where, name) for name in re.findall(r"(?<![\w.])longshore(?:\.[A-Za-z_]\w*)+", block.text)}
        for module, names in re.findall(r"^from (longshore[\w.]*) import ([\w, ]+)", block.text, re.MULTILINE):
            used |= {(block.where, f"{module}.{name.strip()}") for name in names.split(",")}
    assert len({name for _, name in used}) > 15
    assert sorted((where, name) for where, name in used if name not in NAMES) == []


OLD = "f(a, b=..., *, c, d=...)  note"


@pytest.mark.parametrize(
    "after, still",
    [
        (OLD, True),
        ("f(a, b=..., e=..., *, c, d=..., g=...)  note", True),  # more may be given
        ("f(a=..., b=..., *, c=..., d=..., **more)  note", True),  # less has to be given
        ("f(a, b=..., c=..., d=...)  note", True),  # keywords by position, too
        ("f(first, b=..., *, c, d=...)  note  deprecated: a for first until 0.4", True),
        ("f(a, b=..., *, e, d=...)  note  deprecated: c for e until 0.4", True),
        ("f(first, b=..., *, c, d=...)  note", False),
        ("f(a, b, *, c, d=...)  note", False),
        ("f(a, b=..., *, c, d)  note", False),
        ("f(a, b=..., *, c, d=..., e)  note", False),
        ("f(a, e, b=..., *, c, d=...)  note", False),
        ("f(b=..., *, c, d=...)  note", False),
        ("f(a, *, b=..., c, d=...)  note", False),
        ("f(a, b=..., *, c)  note", False),
        ("f(a, b=..., *, c, d=...)  another note", False),
        ("f  note", False),
    ],
)
def test_which_changes_break_programs(after: str, still: bool) -> None:
    assert allows(OLD, after) is still


def test_a_deprecated_name_is_not_removed_unnoticed() -> None:
    deprecated = "f(b)  deprecated: a for b until 0.4"
    assert allows(deprecated, deprecated.replace("0.4", "0.5"))
    assert not allows(deprecated, "f(b)")


def test_stars_stay() -> None:
    assert not allows("f(*args, **kwargs)", "f(*args)")
    assert not allows("f(*args, **kwargs)", "f(**kwargs)")
    assert allows("f(**kwargs)", "f(*args, **kwargs)")


def test_what_is_said_of_differences() -> None:
    before = "## Python\n\nlongshore.a(x)\nlongshore.b  attribute\nlongshore.c(x)\n\n## Environment\n\nLONGSHORE_D\n"
    after = "## Python\n\nlongshore.a(x, y=...)\nlongshore.c(y)\nlongshore.e\n\n## Environment\n\nLONGSHORE_D\n"
    assert changes(before, after) == Changes(
        added=["added: longshore.e", "extended: longshore.a(x) -> longshore.a(x, y=...)"],
        broken=["removed: longshore.b  attribute", "changed: longshore.c(x) -> longshore.c(y)"],
    )
    assert changes(before, before) == Changes([], [])


@pytest.fixture
def two_names(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A package with two public names, of which the file has one and another."""
    monkeypatch.setattr(public_api, "sections", lambda: {"Python": {"longshore.a": "(x)", "longshore.new": ""}})
    monkeypatch.setattr(public_api, "FILE", FILE.__class__(f"{tmp_path}/public_api.txt"))
    public_api.FILE.write_text(f"{INTRODUCTION}\n## Python\n\nlongshore.a(x)\nlongshore.old\n")


@pytest.mark.usefixtures("two_names")
def test_the_check_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    before = public_api.FILE.read_text()
    assert main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "removed: longshore.old\n  added: longshore.new" in said and ADVICE in said
    assert public_api.FILE.read_text() == before


@pytest.mark.usefixtures("two_names")
def test_without_an_argument_the_file_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "removed: longshore.old" in capsys.readouterr().out
    assert sections_of(public_api.FILE.read_text()) == {"Python": ["longshore.a(x)", "longshore.new"]}
    assert main(["--check"]) == 0 and capsys.readouterr().out == ""


def test_names_of_a_package_that_is_missing_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_api, "sections", lambda: {"Python": {"longshore.a": ""}, "With lightning": {}})
    before = "## Python\n\nlongshore.b\n\n## With lightning\n\nlongshore.integrations.lightning  module\n"
    assert sections_of(page(before)) == {
        "Python": ["longshore.a"],
        "With lightning": ["longshore.integrations.lightning  module"],
    }


def test_the_advice_names_what_there_is() -> None:
    for module in re.findall(r"(?:longshore|scripts)\.[\w.]+\w", ADVICE):
        path = module.replace(".", "/") + ".py"
        assert (ROOT / path).exists() or (ROOT / "src" / path).exists()
    assert (ROOT / "docs" / "stability.md").exists()


def test_the_page_has_the_version_of_the_checkpoint_format() -> None:
    assert f"\n| checkpoints | {VERSION}: " in (ROOT / "docs" / "stability.md").read_text()
