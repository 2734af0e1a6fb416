"""Measure the shape of the house, and hold it: ``python -m scripts.shape``, a part of ``make lint``.

Each measure has a limit in ``scripts/shape.json``, and most have a goal. A value above its limit is an error, and
``--lower`` lowers the limits of those that are below. A limit is raised by hand, in a commit of its own that says why.
``--quick`` leaves out the measures for which tests are collected and trips run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "scripts" / "shape.json"

OUTER = ("compat", "integrations", "plan", "report", "tracing", "cli")
"""Doors, which have others' words for our calls, and tools, which read and never step."""
WITHOUT_OTHERS = ("optim", "store", "tiles", "ranks", "stage3", "kernels", "transfer", "streaming", "layout")
POLICIES = (
    *("Store", "ShardedStore", "Offload", "ShardedOffload", "TiledOptimizer", "MatrixRule", "MuonConfig"),
    *("KeptGradients", "ReleasedGradients", "HostKernels", "EncodedBuffer"),
)
LONGEST_FILE, LONGEST_FUNCTION, MOST_METHODS, MOST_FIELDS = 700, 60, 25, 12


class Shape:
    """What the files of a checkout are like."""

    def __init__(self, root: Path) -> None:
        self._source = root / "src" / "longshore"
        self.texts = {path.relative_to(self._source).as_posix(): path.read_text() for path in self._files("*.py")}
        self.tests = {path: path.read_text() for path in sorted((root / "tests").rglob("*.py"))}

    def _files(self, pattern: str) -> Iterable[Path]:
        return sorted(self._source.rglob(pattern))

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {file: ast.parse(text) for file, text in self.texts.items()}

    def _nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kinds))

    def _core(self) -> dict[str, str]:
        return {file: text for file, text in self.texts.items() if room_of(file) not in OUTER}

    def _hits(self, pattern: str, files: Callable[[str], bool] = lambda _: True) -> int:
        return sum(len(re.findall(pattern, text)) for file, text in self.texts.items() if files(file))

    def core_lines(self) -> int:
        return sum(text.count("\n") for text in self._core().values())

    def core_files(self) -> int:
        return len(self._core())

    def long_files(self) -> int:
        return sum(text.count("\n") > LONGEST_FILE for text in self.texts.values())

    def long_functions(self) -> int:
        """Counted from the first statement on: the signature of a command is its table of options."""
        functions = self._nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        return sum((node.end_lineno or 0) - node.body[0].lineno + 1 > LONGEST_FUNCTION for node in functions)  # pyright: ignore

    def imported(self, module: str) -> list[str]:
        """The files that a module imports, directly or through others; itself included, its packages not."""
        modules = {module_of(file): file for file in self.texts}
        seen: dict[str, None] = {}
        todo = [module]
        while todo:
            name = todo.pop()
            if (file := modules.get(name)) is None or file in seen:
                continue
            seen[file] = None
            for node in ast.walk(self.trees[file]):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longshore"):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    todo += [each if each in modules else str(node.module) for each in names]
        return [*seen]

    def adamw_files(self) -> int:
        return len(self.imported("longshore.optim.rules.adam"))

    def adamw_lines(self) -> int:
        return sum(self.texts[file].count("\n") for file in self.imported("longshore.optim.rules.adam"))

    def seam_names(self) -> int:
        """Names that the seam offers to type checkers, which are those that it has."""
        nodes = ast.walk(ast.parse(self.texts.get("seam.py", "")))
        return sum(len(node.names) for node in nodes if isinstance(node, ast.ImportFrom) and node.col_offset > 0)

    def private_reaches(self) -> int:
        return self._hits(r"(?<!numpy)\._core\b", lambda file: room_of(file) != "optim")

    def policies_asked(self) -> int:
        return self._hits(rf"isinstance\([^()]*, \(?(?:{'|'.join(POLICIES)})\b")

    def other_projects(self) -> int:
        return self._hits(r"(?i)deepspeed|accelerate\b|transformers", lambda file: room_of(file) in WITHOUT_OTHERS)

    def seeds(self) -> int:
        return sum(re.search(r"\bstates_seed\b", text) is not None for text in self.texts.values())

    def plan_conditions(self) -> int:
        return self._hits(r"\.(?:streams|staged|publishes)\b", lambda file: room_of(file) == "plan")

    def tricks(self) -> int:
        tricks = r"_getframe|SetAsyncExc|__class__ = |co_consts|Use_Count"
        return self._hits(tricks, lambda file: room_of(file) in WITHOUT_OTHERS)

    def many_methods(self) -> int:
        """Counted by names: an overload, or the setter of a property, is no further method."""
        bodies = (node.body for node in self._nodes(ast.ClassDef))  # pyright: ignore
        names = ({each.name for each in body if isinstance(each, ast.FunctionDef)} for body in bodies)
        return sum(len(each) > MOST_METHODS for each in names)

    def many_fields(self) -> int:
        return sum(len(_fields_of(node)) > MOST_FIELDS for node in self._nodes(ast.ClassDef))

    def vague_docstrings(self) -> int:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = (ast.get_docstring(node) or "" for node in self._nodes(*kinds))  # pyright: ignore
        return sum(re.search(r"(?i)\b(?:what|whoever|somebody|nobody)\b", text) is not None for text in docs)

    def test_lines(self) -> int:
        return sum(text.count("\n") for text in self.tests.values())


def room_of(file: str) -> str:
    return file.partition("/")[0]


def module_of(file: str) -> str:
    return f"longshore.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def _fields_of(node: ast.AST) -> set[str]:
    """The attributes that a class assigns to ``self``."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name) and each.value.id == "self"
    }  # fmt: skip


MEASURES: dict[str, tuple[Callable[[Shape], int], int | None]] = {
    "lines of the core": (Shape.core_lines, 27_500),
    "files of the core": (Shape.core_files, 110),
    f"files of over {LONGEST_FILE} lines": (Shape.long_files, 0),
    f"functions of over {LONGEST_FUNCTION} lines": (Shape.long_functions, 0),
    "files that longshore.AdamW imports": (Shape.adamw_files, 35),
    "lines that longshore.AdamW imports": (Shape.adamw_lines, 8_500),
    "names in longshore/seam.py": (Shape.seam_names, 60),
    "._core outside of optim/": (Shape.private_reaches, 0),
    "isinstance on our own policies": (Shape.policies_asked, 6),
    "other projects' names in rooms of the core": (Shape.other_projects, 0),
    "files that know states_seed": (Shape.seeds, 6),
    "conditions on streams or staging in plan/": (Shape.plan_conditions, 0),
    "tricks with the interpreter": (Shape.tricks, 0),
    f"classes of over {MOST_METHODS} methods": (Shape.many_methods, 1),
    f"classes of over {MOST_FIELDS} fields": (Shape.many_fields, 3),
    "docstrings with what, whoever, somebody, nobody": (Shape.vague_docstrings, 40),
}
ROWS = "rows of tests that are collected"
GOALS = {name: goal for name, (_, goal) in MEASURES.items()} | {
    ROWS: 8_000,
    "files of the trip of a repeated step": 10,
    "files of the trip of a copied step": 14,
    "files of the trip of a gradient": 24,
}


def measured(root: Path) -> dict[str, int]:
    """What is counted in the text of the files."""
    shape = Shape(root)
    return {name: measure(shape) for name, (measure, _) in MEASURES.items()}


def counted() -> dict[str, int]:
    """What is counted by running something: both trips, and the collection of the tests."""
    collection = ["-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "not slow"]
    with ThreadPoolExecutor() as pool:
        trips, rows = pool.map(_said_by, (["-m", "scripts.trips"], collection))
    found = re.findall(r"^([\w ]+): (\d+) files, (\d+) layers", trips, re.MULTILINE)
    if len(found) != 3 or (collected := re.search(r"^[\d/]*?(\d+) tests collected", rows, re.MULTILINE)) is None:
        raise SystemExit(f"the trips or the collection failed:\n{trips[-1000:]}\n{rows[-1000:]}")
    counts = {f"{kind} of the trip of a {name}": int(count) for name, *both in found
              for kind, count in zip(("files", "layers"), both, strict=True)}  # fmt: skip
    return {**counts, ROWS: int(collected[1])}


def _said_by(words: list[str]) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def above(values: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """A line for each measure that rose, or that has no limit."""
    return [
        f"{name}: {value:,}, and the limit is {limits[name]:,}" if name in limits else f"{name}: it has no limit yet"
        for name, value in values.items()
        if value > limits.get(name, -1)
    ]


def fallen(values: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """A line for each count of a trip that is below its limit: CONTRIBUTING.md names it, and ``tests/test_trips.py``
    asks for the same."""
    return [
        f"{name}: {value:,}, and the limit is {limits[name]:,}"
        for name, value in values.items()
        if " of the trip of a " in name and value < limits.get(name, value)
    ]


def changes(root: Path) -> list[str]:
    """Lines that were added and taken away since the last commit, or by it, by room and by file."""

    def lines(*since: str) -> list[list[str]]:
        command = ["git", "diff", "--numstat", *since, "--", "src/longshore"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        return [line.split("\t") for line in done.stdout.splitlines()]

    if shutil.which("git") is None:
        return []
    found = lines("HEAD") or lines("HEAD~1", "HEAD")
    rooms: dict[str, list[tuple[str, int, int]]] = {}
    for added, removed, file in found:
        if added.isdigit():
            name = file.removeprefix("src/longshore/")
            rooms.setdefault(room_of(name), []).append((name, int(added), int(removed)))
    said = []
    for room, files in sorted(rooms.items()):
        said.append(f"  {room}: +{sum(added for _, added, _ in files)} -{sum(removed for *_, removed in files)}")
        said += [f"    {name}: +{added} -{removed}" for name, added, removed in files if name != room]
    return said


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.shape", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what is counted in the text")
    parser.add_argument("--lower", action="store_true", help="write lower limits where values are below them")
    arguments = parser.parse_args(words)
    values = measured(ROOT) | ({} if arguments.quick else counted())
    limits: dict[str, int] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    if said := changes(ROOT):
        print("lines of this change, or of the last commit:", *said, sep="\n")
    for name, value in values.items():
        goal = GOALS.get(name)
        print(f"{value:8,}  {name}" + ("" if goal is None else f" (goal {goal:,})"))
    print(f"{Shape(ROOT).test_lines():8,}  lines of tests (goal 63,000)")
    if arguments.lower:
        lowered = {name: min(value, limits.get(name, value)) for name, value in values.items()}
        LIMITS.write_text(json.dumps({**limits, **lowered}, indent=1) + "\n")
        limits = {**limits, **lowered}
    rose = above(values, limits)
    for line in rose:
        print(f"rose: {line}", file=sys.stderr)
    if rose:
        print("Write less, or raise the limit in scripts/shape.json, in a commit of its own.", file=sys.stderr)
    fell = fallen(values, limits)
    for line in fell:
        print(f"fell: {line}", file=sys.stderr)
    if fell:
        print("Run python -m scripts.shape --lower, and correct the walks in CONTRIBUTING.md.", file=sys.stderr)
    return 1 if rose or fell else 0


if __name__ == "__main__":
    sys.exit(main())
