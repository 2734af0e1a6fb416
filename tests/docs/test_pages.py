"""What the pages say is there: generated parts are current, links and names lead somewhere, the site is whole."""

from __future__ import annotations

import ast
import os
import re
from functools import lru_cache
from pathlib import Path

import pytest
from code_blocks import PAGES, ROOT

import longshore
import longshore.errors
from longshore.compat.config.table import TABLE
from longshore.engine.config import Config
from longshore.tiles import events as tile_events
from longshore.tiles.tile import TileEvent
from scripts.docs import advice, config_page, errors_page, tests_page, tile_table
from scripts.docs.__main__ import main
from scripts.docs.generated import DOCS, GENERATED
from scripts.docs.messages import SOURCE, Message, messages, messages_of


@pytest.mark.medium
@pytest.mark.parametrize("name", GENERATED)
def test_what_is_generated_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name](), "run: python -m scripts.docs"


@pytest.mark.medium
def test_the_command_says_what_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check"]) == 0 and capsys.readouterr().out == ""
    monkeypatch.setitem(GENERATED, "pictures/stages.svg", lambda: "another")
    before = (DOCS / "pictures/stages.svg").read_text()
    assert main(["--check"]) == 1
    assert "docs/pictures/stages.svg" in capsys.readouterr().out
    assert (DOCS / "pictures/stages.svg").read_text() == before


def test_every_source_file_has_tests() -> None:
    found = tests_page.tests_of()
    assert [file for file, tests in found.items() if not any(tests)] == []
    assert tests_page.THROUGH.keys() <= found.keys()
    named = {name for names in tests_page.THROUGH.values() for name in names}
    assert [name for name in named if not (tests_page.TESTS / name).exists()] == []


# -- errors -------------------------------------------------------------------


def test_every_exception_is_on_the_page() -> None:
    public = [name for name in longshore.__all__ if name.endswith("Error")]
    assert set(public) == set(advice.BY_CLASS)
    raised = {name for name, kind in vars(longshore.errors).items() if isinstance(kind, type)}
    assert raised <= set(advice.BY_CLASS)


@pytest.mark.medium
def test_every_message_is_on_the_page() -> None:
    """Counted in another way: each literal text that is raised is in the page, up to its first filled-in value."""
    page = re.sub(r"\\(.)", r"\1", errors_page.page())
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = node.exc.args[0]
                first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                words = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
                start = " ".join(re.split(r"[;:(.,]", words)[0].split())
                if " " in start and start not in page:
                    missing.append(f"{path.name}:{node.lineno}: {start}")
    assert missing == []
    assert len(messages()) > 400


def test_a_message_is_split_into_rule_and_advice() -> None:
    def split(text: str) -> tuple[str, str]:
        return errors_page.split(Message("optim/rules/adam.py", 1, "ValueError", text))

    assert split("a is b; use c") == ("a is b", "Use c.")
    assert split("a is «b» (for d, use c_d())") == ("a is «b»", r"For d, use c\_d().")
    assert split("lr must be 1, and is «lr»") == ("lr must be 1, and is «lr»", "Give 1.")


def test_a_message_without_advice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message("optim/rules/adam.py", 7, "ValueError", "something odd")
    errors_page.split(message)
    monkeypatch.setattr(errors_page, "section_of", lambda _: advice.Section("", "", (), ""))
    with pytest.raises(errors_page.UnknownAdviceError, match=r"optim/rules/adam.py:7: .*something odd"):
        errors_page.split(message)


def test_messages_are_found_wherever_an_error_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.docs import messages as module

    monkeypatch.setattr(module, "SOURCE", tmp_path)
    (tmp_path / "a.py").write_text(
        "raise ValueError(f'{x.name} is {y!r}; ' 'use z')\n"
        "def f():\n    return GradientError('late ' + ('a b' if x else 'c d'))\n"
        "raise Other(1)\nraise TypeError(text)\n"
    )
    found = [(message.kind, message.text) for message in messages_of(tmp_path / "a.py")]
    assert found == [
        ("ValueError", "«name» is «y»; use z"),
        ("GradientError", "late a b"),
        ("GradientError", "late c d"),
    ]


# -- configuration, tiles -----------------------------------------------------


def test_every_field_says_what_it_does() -> None:
    assert set(config_page.attributes_of(Config)) == set(Config.model_fields)
    page = config_page.page()
    assert all(f"| `{name}` |" in page for name in Config.model_fields)
    keys = config_page.keys_of_fields()
    assert set(keys) == set(Config.model_fields)
    assert {path for paths in keys.values() for path in paths} <= {key.path for key in TABLE}


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    read = {
        name for path in SOURCE.rglob("*.py") for name in re.findall(r"[\"'](LONGSHORE_\w+)[\"']", path.read_text())
    }
    assert read == set(config_page.VARIABLES)


def test_every_event_of_a_trace_is_in_the_table() -> None:
    names = [value for name, value in vars(tile_events).items() if name.isupper() and isinstance(value, str)]
    assert "measure early" in names and "fetch" in names
    (table,) = re.findall(r"^\| event \| what it is \|\n(?:\|.*\n)+", (DOCS / "optimizer.md").read_text(), re.MULTILINE)
    told = re.findall("`([^`]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert not {*names} - {*told}


def test_every_event_of_a_tile_is_told() -> None:
    assert set(tile_table.EVENTS) == set(TileEvent)


# -- names and links ----------------------------------------------------------

_NAMED = re.compile(r"`((?:tests|examples|scripts|benchmarks|models|native|docs|src)/[\w./-]*)(?:::(\w+))?")


@lru_cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for name, test in _NAMED.findall(page.read_text()):
        path = ROOT / name
        assert path.exists() or (ROOT / "src/longshore" / name).exists(), f"{page.name} names {name}"
        assert not test or test in _functions(path), f"{page.name} names {name}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# -- the site -----------------------------------------------------------------


def test_every_regression_test_is_on_the_page_of_bugs_elsewhere() -> None:
    page = (DOCS / "bugs_elsewhere.md").read_text()
    files = [path.name for path in (ROOT / "tests/regressions").glob("test_*.py")]
    assert files and [name for name in files if f"`tests/regressions/{name}`" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    said = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert said == {name for name in there if not name.startswith("results/")}, "mkdocs.yml, nav"


def test_everything_that_is_public_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    of_modules = {name for name in longshore.__all__ if name in vars(longshore.errors)}
    assert set(longshore.__all__) - of_modules <= shown
    assert "longshore.errors" in text and {"utils", "checkpointing"} <= shown


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]+src=[\"']?(https?:[^\"'\s>]+)", text)
        fetched += re.findall(
            r"<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]*href=[\"']?(https?:[^\"'\s>]+)", text
        )
        assert fetched == [], page.name
        assert "<!-- block" not in text, page.name
    assert "clip_grad_norm_" in (tmp_path / "reference" / "optimizers.html").read_text()
    assert (tmp_path / "source" / "examples" / "multi_task.py.txt").is_file()
    # Searching where the pages are opened from a folder: what the theme loads there, in place of a worker and JSON.
    assert (tmp_path / "search" / "search_index.js").read_text().startswith('var __index = {"config"')
    assert all(
        re.search(r'<script src="(\.\./|/|/longshore/)*search_from_files\.js"', page.read_text()) for page in pages
    )
    assert "window.Worker = class" in (tmp_path / "search_from_files.js").read_text()
