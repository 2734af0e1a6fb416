"""Who may know whom (CONTRIBUTING.md, "The house"), read from the source."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import longshore
from longshore import seam
from longshore.engine import config

SOURCE = Path(__file__).parents[1] / "src" / "longshore"

LEVELS = [
    {
        "errors",
        "accelerator",
        "byte_sizes",
        "deprecation",
        "interrupts",
        "layout",
        "lazily",
        "machine",
        "torch_versions",
        "units",
    },
    {"kernels", "transfer"},
    {"ranks", "tiles", "activations"},
    {"store"},
    {"optim", "streaming"},
    {"stage3"},
    {"checkpoint"},
    {"engine"},
    {"utils"},
    {"seam"},
    {"compat"},
    {"checkpointing", "tracing", "report"},
    {"plan"},
    {"integrations"},
    {"cli"},
]
"""Left to right. A room may import itself and what is to its left, but not its neighbour on the same level."""

OUTER = {"compat", "integrations", "plan", "report", "tracing", "cli"}
PUBLIC = ("longshore", "longshore.checkpointing", "longshore.engine.config", "longshore.utils")
"""Modules from which users import; scripts/docs/public_api.py lists their names."""

LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))
OTHERS = {"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed"}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Dotted names, ``from a.b import c`` as ``a.b.c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return None if left is None else f"{left}.{node.attr}"
    return None


def names_of(tree: ast.AST) -> set[str]:
    """Every dotted name that the file uses or imports."""
    used = {name for node in ast.walk(tree) if (name := dotted(node)) is not None}
    return used | {name for name, _ in imports_of(tree)}


def wrong_imports(room: str, tree: ast.AST) -> list[str]:
    wrong = []
    for name, _ in imports_of(tree):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package != "longshore" or target == room:
            continue
        if target in LEVEL_OF:
            if LEVEL_OF[target] >= LEVEL_OF[room]:
                wrong.append(name)
        elif room not in OUTER:
            wrong.append(f"{name} (the public face, which imports the rooms)")
    return wrong


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(file) for file in FILES} <= {*LEVEL_OF, "__init__", "__main__"}
    assert {"errors", "layout", "kernels", "transfer", "tiles", "optim"} <= {room_of(file) for file in FILES}


def broken_by(rule: Callable[[Path], Iterable[str]], files: Iterable[Path] = FILES) -> dict[str, list[str]]:
    """The names with which files break a rule, by file: one test for all, since a row a file took most of the time."""
    found = {str(file.relative_to(SOURCE)): sorted(rule(file)) for file in files}
    return {file: names for file, names in found.items() if names}


def test_imports_run_one_way() -> None:
    assert broken_by(lambda file: wrong_imports(room_of(file), parsed(file)), in_rooms()) == {
        # A public module, with two names of a door.
        "engine/config/__init__.py": [
            "longshore.compat.config.load.LoadedConfig",
            "longshore.compat.config.load.load_config",
        ]
    }


def in_rooms() -> list[Path]:
    return [file for file in FILES if room_of(file) in LEVEL_OF]


def test_rooms_of_the_core_leave_the_public_module_of_configurations_to_users() -> None:
    modules = {module_of(file) for file in FILES}

    def names_for_users(file: Path) -> set[str]:
        names = {name for name, _ in imports_of(parsed(file))} - modules  # the module leads to a door
        return {name for name in names if name.rpartition(".")[0] == "longshore.engine.config"}

    core = [file for file in in_rooms() if LEVEL_OF[room_of(file)] <= LEVEL_OF["engine"]]
    assert broken_by(names_for_users, core) == {}


@pytest.mark.parametrize(
    ("room", "source", "allowed"),
    [
        ("tiles", "from longshore.transfer import CopyStreams", True),
        ("tiles", "from longshore.tiles.tile import Tile", True),
        ("tiles", "from longshore.optim import AdamW", False),
        ("tiles", "from longshore import optim", False),
        ("tiles", "import longshore.engine", False),
        ("tiles", "import longshore", False),
        ("tiles", "def f():\n    import longshore.cli", False),
        ("kernels", "from longshore.transfer import CopyStreams", False),
        ("cli", "import longshore", True),
        ("cli", "from longshore.optim import AdamW", True),
    ],
)
def test_the_rule_itself(room: str, source: str, allowed: bool) -> None:
    assert (wrong_imports(room, ast.parse(source)) == []) is allowed


def past_the_seam(tree: ast.AST) -> list[str]:
    """Names of the core that are imported from elsewhere than the seam, and are not public."""
    wrong = []
    for name, node in imports_of(tree):
        parts = name.split(".")
        if parts[0] != "longshore" or (len(parts) > 1 and parts[1] in OUTER | {"seam"}) or name in PUBLIC:
            continue
        module, _, attribute = name.rpartition(".")
        public = isinstance(node, ast.ImportFrom) and module in PUBLIC
        if not public or attribute not in importlib.import_module(module).__all__:
            wrong.append(name)
    return wrong


def test_doors_and_tools_know_the_core_by_public_names_and_the_seam() -> None:
    outer = [file for file in FILES if room_of(file) in OUTER]
    assert len(outer) > 50 and broken_by(lambda file: past_the_seam(parsed(file)), outer) == {}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from longshore import AdamW, utils", []),
        ("import longshore", []),
        ("from longshore.engine.config import Config", []),
        ("from longshore.seam import TiledOptimizer", []),
        ("from longshore.cli.settings import DTYPES", []),
        ("from longshore import machine", ["longshore.machine"]),
        ("from longshore.optim import AdamW", ["longshore.optim.AdamW"]),
        ("def f():\n    from longshore.tiles.tiles import Tiles", ["longshore.tiles.tiles.Tiles"]),
        ("import longshore.optim.rules", ["longshore.optim.rules"]),
        ("from longshore.engine.config import model", ["longshore.engine.config.model"]),
    ],
)
def test_the_rule_of_the_seam_itself(source: str, wrong: list[str]) -> None:
    assert past_the_seam(ast.parse(source)) == wrong


def test_the_seam_has_what_doors_and_tools_import_and_type_checkers_see_the_same() -> None:
    used = {
        name.removeprefix("longshore.seam.")
        for file in FILES
        if room_of(file) in OUTER
        for name, _ in imports_of(parsed(file))
        if name.startswith("longshore.seam.")
    }
    offered = {f"{home}.{name}" for home, names in seam.HOMES.items() for name in names.split()}
    assert {name.rpartition(".")[2] for name in offered} == used
    (typed,) = (each for each in parsed(SOURCE / "seam.py").body if isinstance(each, ast.If) and each.orelse == []
                and isinstance(each.test, ast.Name))  # fmt: skip
    assert {name for name, _ in imports_of(typed)} == offered
    for name in used:
        assert getattr(seam, name) is not None
    with pytest.raises(AttributeError, match=r"'longshore\.seam' has no attribute 'lost'"):
        _ = seam.lost  # pyright: ignore[reportAttributeAccessIssue]


def test_the_core_does_not_import_its_seam() -> None:
    def seams(file: Path) -> set[str]:
        return {name for name in names_of(parsed(file)) if name.startswith("longshore.seam")}

    assert broken_by(seams, [file for file in FILES if room_of(file) not in OUTER]) == {}
    assert "plan/layout.py" in broken_by(seams)  # the search finds what there is


def test_the_public_face_imports_neither_the_command_line_nor_other_peoples_shapes() -> None:
    names = {name for name, _ in imports_of(ast.parse((SOURCE / "__init__.py").read_text()))}
    assert not {name for name in names if name.startswith(("longshore.cli", "longshore.integrations"))}


def test_only_transfers_name_streams() -> None:
    def streams(file: Path) -> set[str]:
        return {
            name
            for name in names_of(parsed(file))
            if name.startswith(("torch.cuda.", "torch.accelerator.", "torch.Stream", "torch.Event"))
            and any(word in name.lower() for word in ("stream", "event"))
        }

    found = broken_by(streams)
    assert {"torch.Stream", "torch.accelerator.current_stream"} <= set(found["transfer/device.py"])
    assert set(found) <= {"transfer/device.py", "accelerator.py"}


def test_only_rooms_of_ranks_name_torch_distributed() -> None:
    def named(file: Path) -> set[str]:
        return {name for name in names_of(parsed(file)) if name.startswith("torch.distributed")}

    below = [file for file in FILES if LEVEL_OF.get(room_of(file), 0) < LEVEL_OF["stage3"] and room_of(file) != "ranks"]
    found = broken_by(named, below)
    # What a parameter is, where it is a DTensor.
    assert all(name.startswith("torch.distributed.tensor") for name in found.pop("optim/dtensor.py"))
    assert found == {}


def test_only_integrations_imports_other_peoples_shapes() -> None:
    def theirs(file: Path) -> set[str]:
        return {package for name, _ in imports_of(parsed(file)) if (package := name.partition(".")[0]) in OTHERS}

    assert {file.partition("/")[0] for file in broken_by(theirs)} == {"integrations"}


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, longshore; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


HEAVY = {"transformers", "accelerate", "lightning", "matplotlib", "typer", "rich", "safetensors"}


@pytest.mark.medium
def test_importing_longshore_is_light() -> None:
    assert not modules_after("longshore.__version__") & {*HEAVY, "torch", "numpy"}
    loaded = modules_after("longshore.AdamW")
    assert "torch" in loaded
    assert not loaded & HEAVY
    # Dynamo takes as long as torch. torch imports it with the first optimizer; commands that make none do without.
    planning = "longshore.Engine; import longshore.plan.planner, longshore.plan.reading"
    assert "torch._dynamo" not in modules_after(planning)


def test_the_command_line_shows_help_without_torch() -> None:
    assert "torch" not in modules_after("from longshore import cli; cli.main(['train', '--help'])")


def test_every_public_name_is_there() -> None:
    import longshore

    assert set(longshore.__all__) <= set(dir(longshore))
    for name in longshore.__all__:
        assert getattr(longshore, name).__name__ == name
    with pytest.raises(AttributeError, match="AdamX"):
        _ = longshore.AdamX  # pyright: ignore[reportAttributeAccessIssue]


def module_of(file: Path) -> str:
    return ".".join(["longshore", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def test_no_module_imports_itself_by_way_of_another() -> None:
    """Imports inside functions, and for annotations only, count too."""
    modules = {module_of(file) for file in FILES}
    sorter: TopologicalSorter[str] = TopologicalSorter()  # Python 3.10 takes no [str] here
    for file in FILES:
        for name, _ in imports_of(parsed(file)):
            found = name if name in modules else name.rpartition(".")[0]
            if found == "longshore":  # which imports its names when they are used
                found = longshore._HOME_OF.get(name.rpartition(".")[2], found)
            elif found == "longshore.engine.config" != name:  # which imports those of a door when they are used
                found = getattr(getattr(config, name.rpartition(".")[2]), "__module__", found)
            if found in modules and found != "longshore.kernels":  # the package has the native module, too
                sorter.add(module_of(file), found)
    sorter.prepare()  # raises CycleError, which names the modules
