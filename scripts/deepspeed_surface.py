"""``python -m scripts.deepspeed_surface FOLDER...``: write docs/deepspeed_surface.md.

That page lists what other projects use of DeepSpeed, and whether longshore has it.

Each folder holds packages beside their metadata, as ``site-packages`` does; so does a wheel that was unpacked (``pip
download --no-deps trl``, ``python -m zipfile -e trl-*.whl FOLDER``). Sources are parsed, and nothing is imported from
them. Without a folder, that of this interpreter is read. ``--again`` reads no sources: it asks longshore again for the
names that the page has.

A name counts where it is imported or read: ``from deepspeed.utils import groups``, ``deepspeed.zero.Init``,
``getattr(deepspeed, "zero")``, and attributes of engines: of what ``deepspeed.initialize()`` returns, and of variables
that are called ``deepspeed_engine`` or are annotated as ``DeepSpeedEngine``.
"""

from __future__ import annotations

import ast
import importlib
import operator
import re
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longshore.compat.engine import Engine
from longshore.compat.finder import HERE

PAGE = Path(__file__).parents[1] / "docs" / "deepspeed_surface.md"
PACKAGES = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "trl": "trl",
    "peft": "peft",
    "lightning": "lightning",
    "llamafactory": "llamafactory",
    "swift": "ms-swift",
    "axolotl": "axolotl",
}
"""Names of projects by those of their packages."""

_ENGINES = {
    "deepspeed_engine",
    "ds_engine",
    "self.deepspeed",
    "self.deepspeed_engine",
    "self.deepspeed_engine_wrapped.engine",
}
"""Expressions that are an engine wherever they occur."""
_ENGINES_IN_DEEPSPEED_FILES = {"self.engine", "engine"}
"""Expressions that are an engine in files with ``deepspeed`` in their name."""
ENGINE = "engine"
"""Stands in the table before the attributes of engines."""


# -- reading -----------------------------------------------------------------------


class _Names(ast.NodeVisitor):
    """Collects what one file uses of DeepSpeed; names of the package without ``deepspeed.``, of engines with it."""

    def __init__(self, path: Path) -> None:
        self.found: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._engines = _ENGINES | (_ENGINES_IN_DEEPSPEED_FILES if "deepspeed" in path.name else set())
        if "arguments" in path.parts:
            self._engines = self._engines - {"self.deepspeed"}  # the path of a file
        self._own: set[str] = set()
        """Attributes that the file itself puts on an engine."""

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.name == "deepspeed" or each.name.startswith("deepspeed."):
                below = each.name.removeprefix("deepspeed").removeprefix(".")
                self._aliases[each.asname or "deepspeed"] = below if each.asname else ""
                self._add(below)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level == 0 and (module == "deepspeed" or module.startswith("deepspeed.")):
            for each in node.names:
                name = f"{module}.{each.name}".removeprefix("deepspeed.")
                self._aliases[each.asname or each.name] = name
                self._add(name)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = set(self._engines)
        for each in (*node.args.args, *node.args.kwonlyargs):
            if each.annotation is not None and "DeepSpeedEngine" in ast.unparse(each.annotation):
                self._engines.add(each.arg)
        self.generic_visit(node)
        self._engines = outside  # another function's variable of that name is something else

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(node.value, ast.Call) and self._name(node.value.func) == "initialize":
            first = target.elts[0] if isinstance(target, (ast.Tuple, ast.List)) and target.elts else target
            self._engines.add(ast.unparse(first))
        alias = self._name(node.value)  # ds_initialize = deepspeed.initialize
        if alias and isinstance(target, ast.Name):
            self._aliases[target.id] = alias
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name(node)
        if name is not None:
            self._add(name)  # the longest chain
            return
        on = ast.unparse(node.value)
        for place in ("", ".optimizer"):
            if on.removesuffix(place) in self._engines and on.endswith(place):
                name = f"{ENGINE}{place}.{node.attr}"
                (self._own if isinstance(node.ctx, ast.Store) else self.found).add(name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            on, what = node.args[0], node.args[1]
            if isinstance(what, ast.Constant) and isinstance(what.value, str):
                self.visit(ast.Attribute(on, what.value, ast.Load()))
                for each in node.args[2:]:
                    self.visit(each)
                return
        self.generic_visit(node)

    def _name(self, node: ast.AST) -> str | None:
        """Return what a chain of attributes names below ``deepspeed``; None for anything else."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self._name(node.value)
            return None if before is None else f"{before}.{node.attr}".removeprefix(".")
        return None

    def _add(self, name: str) -> None:
        if name and not name.endswith(".*"):
            self.found.add(name)


def names_in(path: Path) -> set[str]:
    """Return what a Python file uses of DeepSpeed."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "deepspeed" not in text:
        return set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in others' strings
        tree = ast.parse(text)
    names = _Names(path)
    for _ in range(2):  # imports may come after the functions that use them
        names.visit(tree)
    return names.found - names._own


class Reading(NamedTuple):
    """Versions of the projects that were read, and for each name the projects that use it."""

    versions: dict[str, str]
    used_by: dict[str, set[str]]


def read(folders: Iterable[Path]) -> Reading:
    """Read all projects of :data:`PACKAGES` that are in the folders; the first folder that has one counts."""
    versions: dict[str, str] = {}
    used_by: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for package, project in PACKAGES.items():
            if project in versions or not (folder / package).is_dir():
                continue
            versions[project] = _version(folder, project)
            for path in sorted((folder / package).rglob("*.py")):
                for name in names_in(path):
                    used_by[name].add(project)
    return Reading(versions, used_by)


def _version(folder: Path, project: str) -> str:
    found = [*folder.glob(f"{project.replace('-', '_')}-*.dist-info")]
    if not found:
        raise FileNotFoundError(f"{folder} has no metadata of {project}: unpack its wheel there")
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2]


# -- asking ------------------------------------------------------------------------


class Answer(NamedTuple):
    """What longshore says to a name: ``advice`` is empty if it works; ``known`` is False if nobody thought of it."""

    advice: str
    known: bool = True

    def __str__(self) -> str:
        return f"refused: {self.advice}" if self.advice else "works"


def answer(name: str, engine: Any) -> Answer:
    """Ask for a name below ``deepspeed``, or for an attribute of an engine (``engine.step``)."""
    first, _, rest = name.partition(".")
    try:
        if first == ENGINE:
            operator.attrgetter(rest)(engine)
        else:
            _resolve(name)
    except (AttributeError, ImportError) as error:
        said = re.fullmatch(r"longshore has no \S+: (.*)|'Engine' object has no attribute '\w+'; (.*)", str(error))
        advice = (said[1] or said[2]) if said else ""
        if advice == Engine._where_else:  # said of every name that nobody thought of
            advice = ""
        return Answer(advice or str(error), known=bool(advice) and "does not stand in for it" not in advice)
    return Answer("")


def _resolve(name: str) -> Any:
    found: Any = importlib.import_module(HERE)
    path = HERE
    for part in name.split("."):
        path = f"{path}.{part}"
        found = getattr(found, part)
    return found


def made_engine() -> Any:
    """Return an engine as ``deepspeed.initialize()`` makes it, of a small model on one rank, at stage 3."""
    import torch

    deepspeed: Any = importlib.import_module(HERE)
    content = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=content)[0]


# -- the page ----------------------------------------------------------------------

_INTRODUCTION = """\
# What other projects use of DeepSpeed

<!-- Written by: python -m scripts.deepspeed_surface -->

Every name below `deepspeed` that these projects import or read, and every attribute that they read of an engine
(`engine.`), found in their sources by `scripts/deepspeed_surface.py`:
{versions}.

*Works* means that longshore has the name ([from_deepspeed.md](from_deepspeed.md) says what it does, and which of the
projects' routes were run). Otherwise reading the name raises an error with this advice, and `hasattr` is false, which
most projects ask first. `tests/compat/test_deepspeed_surface.py` asks for every name of this table.

| name | used by | with longshore |
|---|---|---|
"""


def page(reading: Reading, engine: Any) -> str:
    """The whole page.

    Raises:
        ValueError: names that longshore neither has nor refuses with advice of their own.
    """
    in_order = sorted(reading.used_by, key=lambda name: (name.startswith(f"{ENGINE}."), name))
    answers = {name: answer(name, engine) for name in in_order}
    unknown = [f"{name} ({', '.join(sorted(reading.used_by[name]))})" for name in answers if not answers[name].known]
    if unknown:
        raise ValueError("\n  ".join(["neither there nor refused with advice of its own:", *unknown]))
    versions = ", ".join(f"{project} {version}" for project, version in reading.versions.items())
    return _INTRODUCTION.format(versions=versions) + "".join(_rows(answers, reading.used_by))


def _rows(answers: Mapping[str, Answer], used_by: Mapping[str, set[str]]) -> Iterator[str]:
    for name, said in answers.items():
        yield f"| `{name}` | {', '.join(sorted(used_by[name]))} | {said} |\n".replace("*", "\\*")


class Committed(NamedTuple):
    """The page that is there: what was read for it, and ``works`` or the advice by name."""

    reading: Reading
    said: dict[str, str]


def committed() -> Committed:
    """Read the page."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", text, re.MULTILINE)
    listed = re.search(r"deepspeed_surface\.py`:\n(.*)\.\n", text)
    assert rows and listed is not None, f"{PAGE} is not what this script writes"
    versions = dict(each.split() for each in listed[1].split(", "))
    used_by = {name: {*users.split(", ")} for name, users, _ in rows}
    return Committed(Reading(versions, used_by), {name: said.replace("\\*", "*") for name, _, said in rows})


def main(arguments: list[str]) -> int:
    """Write the page; return the exit code."""
    if arguments == ["--again"]:
        reading = committed().reading
    else:
        reading = read(map(Path, arguments or [sysconfig.get_paths()["purelib"]]))
    missing = set(PACKAGES.values()) - reading.versions.keys()
    if missing:
        print(f"not in these folders: {', '.join(sorted(missing))}; download their wheels, and name the folders too")
        return 1
    engine = made_engine()
    try:
        PAGE.write_text(page(reading, engine))
    finally:
        engine.destroy()
    print(f"{PAGE.name}: {len(reading.used_by)} names of {len(reading.versions)} projects")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
