"""What a mutant is, and the tests that mutants name."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

MEMORY = "tests/tiles/test_memory.py"
NORMS = "tests/tiles/test_speculation.py"
SNAPSHOT = "tests/tiles/test_states.py"
STEPPING = "tests/tiles/test_stepping.py"
ARRIVALS = "tests/tiles/test_arrivals.py"
STORE = "tests/tiles/test_tiles.py"
WORKER = "tests/transfer/test_runner.py"
SIMULATED = "tests/transfer/test_simulated.py"
SPECULATION = "tests/optim/test_speculation.py"
UNSEEN_WRITES = "tests/optim/test_unseen_writes.py"
COLLECTIVES = "tests/ranks/test_collective_thread.py"
ROUNDS = "tests/store/test_rounds.py"
TABLE = "tests/engine/test_table.py"
FAILURES = "tests/engine/test_failures.py"
ONE_SIDED = "tests/engine/test_one_sided.py"
REDUCTION = "tests/engine/test_reduction.py"
CLOSING = "tests/engine/test_closing.py"
PENDING = "tests/store/test_rounds.py"
PRESENCE = "tests/ranks/test_presence.py"
GATHERING = "tests/ranks/test_gathering.py"
SHARED_MEMORY = "tests/ranks/test_data_plane.py"
FSDP = "tests/optim/test_fsdp.py"
FULLY_SHARDED = "tests/engine/test_fully_sharded.py"
KEPT = "tests/engine/test_kept_objects.py"
GATHER = "tests/engine/test_gather.py"
TENSOR_PARALLEL = "tests/engine/test_tensor_parallel.py"
SPLIT = "tests/optim/test_split.py"
ASYNC = "tests/checkpoint/test_async.py"
FOLDER = "tests/checkpoint/test_folder.py"
ONE_LINE = "tests/checkpoint/test_one_line.py"
RESHARDING = "tests/checkpoint/test_resharding.py"
RESUME = "tests/checkpoint/test_resume.py"
EXPORT = "tests/checkpoint/test_export.py"
DEEPSPEED = "tests/compat/test_checkpoint_import.py"
PLANNER = "tests/plan/test_planner.py"
PLAN_MEMORY = "tests/plan/test_memory.py"
PLAN_MATRICES = "tests/plan/test_matrices.py"
PLAN_STATES = "tests/plan/test_states.py"
SIMULATION = "tests/plan/test_simulation.py"
COMPAT_NAMES = "tests/compat/test_names.py"
COMPAT_SURFACE = "tests/compat/test_surface.py"
TRAINER = "tests/integrations/transformers/test_trainer.py"
LIGHTNING = "tests/integrations/lightning/test_training.py"
FABRIC = "tests/integrations/lightning/test_fabric.py"
LIGHTNING_CHECKPOINTS = "tests/integrations/lightning/test_checkpoints.py"


@dataclass(frozen=True)
class Mutant:
    """One change that breaks the code.

    Statements are found by their function, wherever its file is, and as ``ast.unparse`` writes them: neither a move
    nor a comment nor a line break hides them.

    Attributes:
        name: what it breaks.
        function: qualified name: ``"Store.commit"``; of a class, what stands in it beside functions.
        source: statements, or a part of one line, that occur once in the functions of this name.
        replacement: what stands there in the mutant.
        tests: what has to catch it: files or node ids, the quickest first.
        on_device: whether they run on the simulated accelerator.
    """

    name: str
    function: str
    source: str
    replacement: str
    tests: tuple[str, ...]
    on_device: bool = False

    @property
    def file(self) -> str:
        """The file with the function, under ``src/longshore``.

        Raises:
            ValueError: there is no such function, or it does not have the source once.
        """
        return self._place[0].file

    def applied_to(self, text: str) -> str:
        """The text of :attr:`file`, mutated."""
        place, mutated = self._place
        lines = text.splitlines()
        changed = textwrap.indent(mutated, place.indent).splitlines()
        return "\n".join([*lines[: place.begin], *changed, *lines[place.end :]]) + "\n"

    @cached_property
    def _place(self) -> tuple[Function, str]:
        places = functions().get(self.function, [])
        found = [
            (place, mutated) for place in places for mutated in _replaced(place.text, self.source, self.replacement)
        ]
        if len(found) != 1:
            raise ValueError(
                f"a mutant's source has to occur once in its function; that of {self.name!r} occurs {len(found)} times "
                f"in {len(places)} functions with the name {self.function}: write it anew"
            )
        return found[0]


class Function(NamedTuple):
    """A function, or a class without its functions: where it is, and its text as ``ast.unparse`` writes it."""

    file: str
    begin: int
    end: int
    """Lines of the file, from 0, the last one excluded."""
    indent: str
    text: str


@cache
def functions(source: Path = ROOT / "src" / "longshore") -> dict[str, list[Function]]:
    """All functions of the package by their qualified names."""
    found: dict[str, list[Function]] = {}
    for path in sorted(source.rglob("*.py")):
        for name, each in functions_of(path.read_text(), path.relative_to(source).as_posix()):
            found.setdefault(name, []).append(each)
    return found


def functions_of(text: str, file: str) -> Iterator[tuple[str, Function]]:
    lines = text.splitlines()

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, (ast.If, ast.Try, ast.With)):  # in which functions may be
                yield from within(each, prefix)
            elif isinstance(each, ast.ClassDef):
                yield from within(each, f"{prefix}{each.name}.")
            elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                begin = min([each, *each.decorator_list], key=lambda part: part.lineno).lineno - 1
                indent = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
                assert each.end_lineno is not None
                yield f"{prefix}{each.name}", Function(file, begin, each.end_lineno, indent, _text_of(each))
            elif isinstance(each, ast.stmt):
                assert each.end_lineno is not None
                yield (
                    prefix[:-1],
                    Function(file, each.lineno - 1, each.end_lineno, " " * each.col_offset, ast.unparse(each)),
                )

    yield from within(ast.parse(text), "")


def _text_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The function without docstrings."""
    for each in ast.walk(function):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(each, False):
            each.body = each.body[1:] or [ast.Pass()]
    return ast.unparse(function)


def _replaced(text: str, source: str, replacement: str) -> Iterator[str]:
    """The text with the source replaced, once for each place where it is: as whole lines at any depth, or else, if it
    is one line, within lines."""
    lines, wanted = text.splitlines(), _unparsed(source).splitlines()
    whole = False
    for at in range(len(lines) - len(wanted) + 1):
        depth = len(lines[at]) - len(lines[at].lstrip())
        if lines[at : at + len(wanted)] == [" " * depth + line for line in wanted]:
            whole = True
            instead = textwrap.indent(replacement, " " * depth).splitlines()
            yield "\n".join([*lines[:at], *instead, *lines[at + len(wanted) :]])
    if not whole and len(wanted) == 1:
        for each in re.finditer(re.escape(source), text):
            yield text[: each.start()] + replacement + text[each.end() :]


def _unparsed(source: str) -> str:
    """Statements as this version of Python writes them; what is no whole statement as it is."""
    for whole in (source, f"{source}\n    pass"):
        try:
            return ast.unparse(ast.parse(whole)).removesuffix("\n    pass" if whole != source else "")
        except SyntaxError:
            pass
    return source


def what_does_not_apply(mutants: Iterable[Mutant]) -> list[str]:
    """A line for each mutant that cannot be played: its text or its tests are gone, or nothing changes."""
    return [f"{mutant.name}: {said}" for mutant in mutants if (said := _what_is_wrong(mutant))]


@cache
def _text_of_tests(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _what_is_wrong(mutant: Mutant) -> str:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        if f"def {function}{'(' if function else ''}" not in _text_of_tests(ROOT / file):
            return f"there is no {test}"
    try:
        place, mutated = mutant._place
        changes = ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(place.text))
    except (ValueError, SyntaxError) as error:
        return str(error)
    return "" if changes else "it changes nothing"
