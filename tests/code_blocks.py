"""The fenced blocks of README.md and docs/, and how each of them is run.

A comment right before a fence, which no reader of the page sees, says what a block needs. Its items stand on lines of
their own, or between `` | ``::

    <!-- block: setup: loop | slow -->

=========================  ================================================================================
``setup: NAME``            the names that the block finds: a function of ``code_block_setups.py``,
                           ``code_block_sharded.py`` or ``code_block_trainers.py``
``continues``              the block goes on with names and folder of the one before it on the page
``ranks: 2``               Python on two ranks
``with: A => B``           ``A``, which has to be there, is ``B`` for the test (a smaller size, a CPU)
``fails: TEXT``            the block ends with an error whose message has this text
``slow``                   not in ``make test``
``full``                   nor in ``make test-slow``, since another test runs the same
``needs torch: NAME``      it needs a newer torch than some; ``torch_needs.py`` has the names
``not run: REASON``        it is not run here; ``test_code_blocks.py`` has the list of all of these
=========================  ================================================================================
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "bash", "json")
LANGUAGES = (*RUN, "text")

_COMMENT = re.compile(r"<!-- block:?\s(.*?)-->\s*\Z", re.DOTALL)
_ITEMS = ("setup", "continues", "ranks", "with", "fails", "slow", "full", "needs torch", "not run")
_FENCE = re.compile(r"^( *)(```+)(.*)$")


@dataclass
class Block:
    """One fenced block.

    Attributes:
        page: relative to the root of the repository.
        line: of its opening fence, from 1.
        language: what the fence says.
        text: without fences and indentation.
        items: of the comment before it; an item that may be repeated (``with``) has a list.
    """

    page: str
    line: int
    language: str
    text: str
    items: dict[str, list[str]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def item(self, name: str) -> str | None:
        return self.items[name][0] if name in self.items else None

    def source(self) -> str:
        """The text with its replacements; each of them has to be about something."""
        text = self.text
        for pair in self.items.get("with", ()):
            old, arrow, new = pair.partition(" => ")
            assert arrow, f"{self.where}: 'with' wants A => B, not {pair!r}"
            assert old in text, f"{self.where}: there is no {old!r} to replace"
            text = text.replace(old, new)
        return text


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    page, lines = path.relative_to(ROOT).as_posix(), path.read_text().splitlines()
    blocks: list[Block] = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent, fence, language = opening.groups()
        end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == fence)
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        before = "\n".join(lines[:number])
        blocks.append(Block(page, number + 1, language.strip(), text, _items(before, f"{page}:{number + 1}")))
        number = end + 1
    comments = path.read_text().count("<!-- block")
    assert comments == sum(bool(block.items) for block in blocks), f"{page}: a comment without a block after it"
    return blocks


def _items(before: str, where: str) -> dict[str, list[str]]:
    start = before.rfind("<!-- block")
    found = _COMMENT.match(before, start) if start >= 0 else None
    if found is None:
        return {}
    items: dict[str, list[str]] = {}
    for item in re.split(r"\n| \| ", found[1].strip()):
        name, _, value = item.strip().partition(": ")
        assert name in _ITEMS, f"{where}: no item of a block: {item!r}"
        items.setdefault(name, []).append(value)
    return items


def chains_of(path: Path) -> list[list[Block]]:
    """The blocks of a page that run, in chains: a block and those that continue it."""
    chains: list[list[Block]] = []
    for block in blocks_of(path):
        if block.language not in RUN or "not run" in block.items:
            continue
        if "continues" in block.items:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def cases() -> Iterator[Any]:
    """A case of pytest for each chain; of slow ones that run the same program the first is not ``full``."""
    seen: set[str] = set()
    for path in PAGES:
        for chain in chains_of(path):
            marks = []
            if any("full" in block.items for block in chain):
                marks = [pytest.mark.full]
            elif any("slow" in block.items for block in chain):
                program = " ".join(chain[0].text.split()[:2])
                marks = [pytest.mark.full if program in seen else pytest.mark.slow]
                seen |= {program} if chain[0].language == "bash" else set()
            marks += [
                pytest.mark.needs_torch(block.item("needs torch")) for block in chain if "needs torch" in block.items
            ]
            name = f"{chain[0].page}-{chain[0].language}-{' '.join(chain[0].text.split())[:50]}"
            yield pytest.param(chain, id=name, marks=marks)


def make_folder(folder: Path) -> None:
    """What a reader has who stands in the root of the repository; what a block writes is not the repository's."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("build", "dist", "runs"):
            (folder / entry.name).symlink_to(entry)


_ALONE = re.compile(r"longshore (?:train|inspect|export|import-deepspeed|plan|report)\b[^|&;<>$`]*")


def run_bash(block: Block, folder: Path) -> None:
    """Run a script as it stands; ``make`` only says what it would do.

    Where all of it is the command line on one rank, it is called in this process, which has torch already.
    """
    lines = [line.partition(" # ")[0].strip() for line in block.source().replace("\\\n", " ").splitlines()]
    if all(_ALONE.fullmatch(line) for line in lines if line):
        for line in filter(None, lines):
            _call(block, shlex.split(line)[1:])
        return
    commands = folder / ".commands"
    if not commands.exists():
        commands.mkdir()
        (commands / "make").write_text('#!/bin/sh\nexec /usr/bin/env -u MAKEFLAGS "$REAL_MAKE" -n "$@"\n')
        (commands / "make").chmod(0o755)
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ,
        "PATH": f"{commands}:{scripts}:{os.environ['PATH']}",
        "REAL_MAKE": _which("make"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.source()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = block.item("fails")
    said = f"{block.where}\n{block.source()}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if expected is None:
        assert done.returncode == 0, said
    else:
        assert done.returncode != 0 and expected in done.stdout + done.stderr, said


def _call(block: Block, arguments: list[str]) -> None:
    from longshore.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    expected = block.item("fails")
    assert (code != 0 and expected in out.getvalue()) if expected else code == 0, f"{block.where}\n{out.getvalue()}"


def _which(program: str) -> str:
    from shutil import which

    return which(program) or program


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block with these names, and leave its own there."""
    code = compile("\n" * block.line + block.source(), str(ROOT / block.page), "exec")
    expected = block.item("fails")
    if expected is None:
        exec(code, names)
        return
    with pytest.raises(Exception, match=re.escape(expected)):
        exec(code, names)


def on_rank(chain: list[Block], folder: str) -> None:
    """A case of :class:`ranks.Ranks`: the chain on each of several ranks."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_chain(chain, Path(folder))
    finally:
        os.chdir(before)


def run_chain(chain: list[Block], folder: Path) -> None:
    """Run the blocks one after the other; Python's share their names."""
    import code_block_setups

    with code_block_setups.prepared(chain[0].item("setup"), folder) as names:
        for block in chain:
            if block.language == "bash":
                run_bash(block, folder)
            elif block.language == "json":
                check_json(block)
            else:
                run_python(block, names)


def check_json(block: Block) -> None:
    """It is a configuration that the engine takes."""
    import json

    from longshore.engine.config import load_config

    # A page shows the keys that it is about; a batch size has to be somewhere.
    load_config({"train_micro_batch_size_per_gpu": 1, **json.loads(block.source())})


if __name__ == "__main__":
    for each in PAGES:
        for found in blocks_of(each):
            sys.stdout.write(f"{found.where} {found.language} {found.items}\n")
