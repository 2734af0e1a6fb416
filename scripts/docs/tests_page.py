"""tests/README.md: for each source file the tests that are about it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src" / "longshore", ROOT / "tests"

_MOST = 8
"""Of more tests that import a file than these the page says only how many there are."""

HEAD = """# Tests

<!-- Generated: python -m scripts.docs -->

The tests of a source file are in the folder of its room, in the file of its name. Where a file has none, or where
others are about it too, this page says which: those that have to fail where a mutant breaks it (`tests/mutants/`, with
the number of mutants), and those that import it. Many more run through it: `tests/engine/scenarios.py` is the table of
scenarios that every kind of engine passes, `tests/fuzz/` makes programs at random, and `tests/replay/` compares what
the native kernels are given with a recording.

`make unit` runs the rooms that are tested without any process of ranks, `make test` all that is quick.
"""


THROUGH: dict[str, tuple[str, ...]] = {
    "__init__.py": ("docs/test_public_api.py", "test_imports.py"),
    "cli/__init__.py": ("cli/test_options.py", "cli/test_text.py"),
    "cli/checkpoints.py": ("checkpoint/test_inspection.py", "checkpoint/test_export.py"),
    "cli/contestants.py": ("cli/test_demo.py",),
    "cli/run_deepspeed.py": ("compat/test_run.py", "compat/test_routes.py"),
    "compat/activation_checkpointing.py": ("engine/test_activation_checkpointing.py",),
    "compat/configuration.py": ("compat/test_surface.py",),
    "compat/constructors.py": ("compat/test_replaced_optimizers.py", "compat/test_surface.py"),
    "compat/distributed.py": ("compat/test_surface.py", "compat/test_scripts.py"),
    "compat/initialize.py": ("compat/test_engine.py", "engine/test_initialize.py"),
    "compat/offload_config.py": ("compat/test_names.py", "compat/test_surface.py"),
    "compat/utils.py": ("compat/test_surface.py", "engine/test_access.py"),
    "engine/config/__init__.py": ("engine/config/test_model.py",),
    "engine/creation.py": ("engine/test_initialize.py", "engine/test_starting.py"),
    "engine/wording.py": ("engine/config/test_model.py", "compat/config/test_translate.py"),
    "integrations/lightning/names.py": ("integrations/lightning/test_settings.py",),
    "integrations/lightning/strategy.py": ("integrations/lightning/test_settings.py",),
    "integrations/lightning/trainer.py": ("integrations/lightning/test_training.py",),
    "integrations/transformers/settings.py": ("integrations/transformers/test_trainer.py",),
    "kernels/triton_formats.py": ("kernels/test_device.py", "simulated_device/test_triton_kernels.py"),
    "lazily.py": ("test_imports.py",),
    "machine/__init__.py": ("machine/test_binding.py", "report/test_facts.py"),
    "optim/other_optimizers.py": ("optim/test_other_words.py", "compat/test_replaced_optimizers.py"),
    "plan/event_simulator.py": ("plan/test_simulation.py",),
    "report/sizes.py": ("report/test_findings.py",),
    "streaming/checks.py": ("streaming/test_refused.py", "streaming/test_host_writes.py"),
    "tracing/export.py": ("tracing/test_trace.py",),
    "transfer/__init__.py": ("transfer/test_device.py", "transfer/test_simulated.py"),
}
"""Tests of files that no test imports: they come through the public names or the commands that the file has."""


def page() -> str:
    lines, folder = [HEAD], None
    for file, found in tests_of().items():
        if (room := file.rpartition("/")[0]) != folder:
            folder = room
            lines += [
                "",
                f"## {room or 'longshore'}",
                "",
                "| source | its tests | mutants | others |",
                "|---|---|---|---|",
            ]
        cells = (", ".join(map(str, each)) for each in found)
        lines.append(f"| `{file.rpartition('/')[2]}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tests_of() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Return, by source file: the tests in its mirrored place, those that its mutants have to fail, and others that
    import it or come through it."""
    importing, mutants = tests_by_module(), tests_by_mutant()
    found = {}
    for file in source_files():
        own, broken = mirror_of(file), mutants.get(file, Counter())
        # A package's own file has the names of others.
        others = set() if file.endswith("__init__.py") else importing.get(module_of(file), set())
        others = {*others, *THROUGH.get(file, ())} - {own} - set(broken)
        found[file] = (
            [] if own is None else [f"`{own}`"],
            [f"`{name}` ({count})" for name, count in sorted(broken.items())],
            _some([f"`{name}`" for name in sorted(others)]),
        )
    return found


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST else [*names[:_MOST], f"{len(names) - _MOST} more"]


def source_files() -> list[str]:
    """Return the files with a function or a class, relative to the package."""
    files = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if _has_code(path)]
    return sorted(files, key=lambda file: file.rpartition("/"))


def mirror_of(file: str) -> str | None:
    """Return the test file in the mirrored place, relative to tests/, if there is one."""
    folder, _, name = file.rpartition("/")
    stem = folder.rpartition("/")[2] if name == "__init__.py" else name.removesuffix(".py")
    place = Path(folder) / f"test_{stem}.py"
    return place.as_posix() if (TESTS / place).exists() else None


def module_of(file: str) -> str:
    return f"longshore.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def tests_by_module() -> dict[str, set[str]]:
    """Return the test files that import from a module, by the module."""
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for module in _imported(node):
                found.setdefault(module, set()).add(path.relative_to(TESTS).as_posix())
    return found


@cache
def tests_by_mutant() -> dict[str, Counter[str]]:
    """Return how many mutants of a source file each test file has to catch, by the source file."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    from mutants import MUTANTS

    found: dict[str, Counter[str]] = {}
    for mutant in MUTANTS:
        files = {test.partition("::")[0].removeprefix("tests/") for test in mutant.tests}
        found.setdefault(mutant.file, Counter()).update(files)
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def _has_code(path: Path) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.walk(ast.parse(path.read_text())))
