"""Every file of docs/ that is generated, and that of tests/, with what it is now."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from scripts.docs import (
    config_page,
    errors_page,
    keys_page,
    pictures,
    streaming_table,
    tests_page,
    tile_table,
    versions_table,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def levels() -> list[set[str]]:
    """The levels of rooms, from the test that enforces them."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LEVELS":
            return [room for room in ast.literal_eval(node.value) if room]
    raise AssertionError("tests/test_imports.py has no LEVELS")


GENERATED: dict[str, Callable[[], str]] = {
    "configuration.md": config_page.page,
    "deepspeed_config.md": keys_page.page,
    "errors.md": errors_page.page,
    "how_it_works.md": lambda: tile_table.filled((DOCS / "how_it_works.md").read_text()),
    "pictures/gradient.svg": pictures.life_of_a_gradient,
    "pictures/rooms.svg": lambda: pictures.rooms(levels()),
    "pictures/stages.svg": pictures.stages,
    "pictures/tile_states.svg": pictures.tile_states,
    "stability.md": lambda: versions_table.filled((DOCS / "stability.md").read_text()),
    "../tests/README.md": tests_page.page,
    "streaming.md": lambda: streaming_table.filled((DOCS / "streaming.md").read_text()),
}
"""By name in docs/; a function that gives its content."""
