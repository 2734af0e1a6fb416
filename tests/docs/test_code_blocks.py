"""Every fenced block of README.md and docs/ runs, or is in the list of those that do not, with the reason."""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_blocks import LANGUAGES, PAGES, ROOT, RUN, Block, blocks_of, cases, make_folder, on_rank, run_chain
from ranks import Ranks

BLOCKS = [block for page in PAGES for block in blocks_of(page)]

NOT_RUN = {
    (
        "docs/costs.md",
        "python -m benchmarks.gpu",
    ): "minutes even at its smallest; tests/benchmarks/test_gpu.py runs its parts",
    ("README.md", "git clone https"): "installs packages",
    ("docs/index.md", "git clone https"): "installs packages",
    (
        "docs/streaming.md",
        "longshore train --model",
    ): "needs an accelerator; tests/streaming/test_page.py runs it on the simulated one",
    (
        "docs/adding_an_optimizer.md",
        '"""SGD by the sign',
    ): "tests/docs/test_adding_an_optimizer.py follows the page",
    (
        "docs/pytorch_distributed.md",
        "from dataclasses import",
    ): "needs torchtitan, which is no dependency",
    (
        "docs/streaming.md",
        "import longshore",
    ): "needs an accelerator; tests/streaming/test_page.py runs it on the simulated one",
}
"""By page and how the block begins. A line more has to be argued for: what can run in a small form does."""


@pytest.mark.quick(0)
@pytest.mark.parametrize("chain", list(cases()))
def test_runs(chain: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    make_folder(tmp_path)
    count = chain[0].item("ranks")
    if count is None:
        monkeypatch.chdir(tmp_path)
        run_chain(chain, tmp_path)
    else:
        ranks: Ranks = request.getfixturevalue({"2": "two_ranks"}[count])
        ranks(on_rank, chain, str(tmp_path))


def test_those_that_do_not_run_are_listed() -> None:
    found = {
        (block.page, block.text[:13].strip()): block.item("not run") for block in BLOCKS if "not run" in block.items
    }
    assert found == {(page, start[:13].strip()): reason for (page, start), reason in NOT_RUN.items()}
    assert len(BLOCKS) - len(found) > 30


def test_every_block_says_what_it_is() -> None:
    """A block without a language, or of an unknown one, would be left out without a word."""
    wrong = [f"{block.where}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES]
    assert wrong == [], f"the language of a fence is one of {', '.join(LANGUAGES)}"
    assert {block.language for block in BLOCKS} >= set(RUN)


CONTRIBUTING = ROOT / "CONTRIBUTING.md"
"""Its blocks are read, and not run: they are the targets of the Makefile."""


def _in_blocks() -> Iterator[tuple[str, str]]:
    for block in [*BLOCKS, *blocks_of(CONTRIBUTING)]:
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from ((block.where, command) for command in re.split(r"\s&& ", line.partition(" # ")[0]))


def _in_prose() -> Iterator[tuple[str, str]]:
    for page in [*PAGES, CONTRIBUTING]:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        yield from ((page.name, " ".join(found.split())) for found in re.findall(r"(?<![`\\])`([^`]+)`(?!`)", prose))


PARSERS = {
    r"(?:torchrun .* -m )?longshore ([a-z-]+ .*)": "longshore.cli",
    r"python -m benchmarks\.gpu(.*)": "benchmarks.gpu.__main__",
    r"python -m benchmarks( .*)": "benchmarks.__main__",
    r"make ([a-z-]+)": "make",
    r"(?:python -m )?pytest (?:-q )?(tests/\S+).*": "pytest",
}
COMMANDS: dict[str, list[tuple[str, str]]] = {}
"""By page: the program, and its words."""
for where, line in (*_in_blocks(), *_in_prose()):
    for pattern, name in PARSERS.items():
        if (command := re.fullmatch(pattern, line.strip())) and "..." not in line:
            COMMANDS.setdefault(re.split(r"[ :]", where)[0], []).append((name, command[1]))


@pytest.mark.quick(0)
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_have_options_that_exist(page: str) -> None:
    """Those of the prose too, and of blocks that are slow or do not run: read by the program's own parser, not run."""
    for program, arguments in COMMANDS[page]:
        parse(program, arguments)


def parse(program: str, arguments: str) -> None:
    words = [word for word in shlex.split(arguments, comments=True) if word != "--help"]
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pytest":
        assert (ROOT / words[0].partition("::")[0]).exists()
    else:
        import typer

        module = importlib.import_module(program)
        if hasattr(module, "app"):
            command: Any = typer.main.get_command(module.app).commands[words.pop(0)]  # pyright: ignore
            words = [word if word not in ("DIR", "COMMAND") else str(ROOT) for word in words]
        else:
            alone = typer.Typer()
            alone.command()(module.main)
            command = typer.main.get_command(alone)
        command.make_context(program, words)


def test_commands_were_found_everywhere() -> None:
    assert {program for each in COMMANDS.values() for program, _ in each} == set(PARSERS.values())
    assert sum(map(len, COMMANDS.values())) > 40


def test_the_folder_of_a_block_is_not_the_repository(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert (tmp_path / "examples" / "multi_task.py").is_file()
    assert not os.path.samefile(tmp_path, ROOT)
    assert not (tmp_path / ".git").exists()
