"""Somebody who reads how it works, with the code beside: what the pages name is there."""

from __future__ import annotations

import ast
import re

import pytest

from walks.running import ROOT

SOURCE = ROOT / "src/longshore"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
HOW = (ROOT / "docs/how_it_works.md").read_text()
PLACES = [
    (path, name)
    for text in (CONTRIBUTING, HOW)
    for path, name in re.findall(r"`((?:src/longshore/)?[a-z_]+/[\w/]+\.py)(?::\s+([\w.]+))?`", text)
]


def names_of(path: str) -> set[str]:
    """Functions and classes of a file, and methods as ``Class.method`` and as ``method``."""
    tree = ast.parse((SOURCE / path.removeprefix("src/longshore/")).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {*methods, *(f"{node.name}.{each}" for each in methods)}
    return found


@pytest.mark.parametrize(("path", "name"), [place for place in PLACES if not place[0].startswith(("tests", "scripts"))])
def test_a_step_of_a_walk_is_where_it_says(path: str, name: str) -> None:
    assert not name or name in names_of(path)


def test_the_walks_were_found() -> None:
    assert len([name for _, name in PLACES if name]) > 15


def test_the_house_has_every_room() -> None:
    house = CONTRIBUTING.partition("## The house")[2].partition("## ")[0]
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {room for room in rooms if f"{room}/" not in house} == set()


def test_each_page_of_the_reading_order_leads_to_the_next() -> None:
    order = HOW.partition("## Reading order")[2].partition("\n## ")[0]
    targets = re.findall(r"\]\(([^)#]+)", order)
    assert {"laws.md", "arithmetic.md", "../CONTRIBUTING.md", "adding_an_optimizer.md"} <= set(targets)
