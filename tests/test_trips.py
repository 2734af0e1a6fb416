"""The walks in CONTRIBUTING.md are those that the code takes: their counts, and the files and functions they name."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from scripts.shape import LIMITS, ROOT
from scripts.trips import SOURCE, TRIPS, Trip

WALKS = ROOT.joinpath("CONTRIBUTING.md").read_text().partition("## Two walks")[2].partition("\n## ")[0]
STEP, GRADIENT = WALKS.split("\n### ")[1:]
pytestmark = pytest.mark.medium


@cache
def taken(name: str) -> Trip:
    return TRIPS[name]()


def files_of(name: str) -> set[str]:
    return {file.removeprefix(SOURCE) for file in taken(name).calls}


@pytest.mark.parametrize("name", TRIPS)
def test_a_trip_has_as_many_files_and_layers_as_its_limits_say(name: str) -> None:
    trip, limits = taken(name), json.loads(LIMITS.read_text())
    assert len(trip.calls) == limits[f"files of the trip of a {name}"]
    assert len(trip.deepest) == limits[f"layers of the trip of a {name}"]


def test_the_walks_say_how_many_files_run() -> None:
    assert (
        re.findall(r"\d+", STEP.splitlines()[0]) == [str(len(files_of(name))) for name in TRIPS if "step" in name][::-1]
    )
    assert f"({len(files_of('gradient'))} files)" in GRADIENT.splitlines()[0]


@pytest.mark.parametrize(
    ("walk", "names"), [(STEP, ("repeated step", "copied step")), (GRADIENT, ("gradient",))], ids=["step", "gradient"]
)
def test_the_walks_name_files_that_run_and_functions_that_they_have(walk: str, names: tuple[str, ...]) -> None:
    run = set[str]().union(*map(files_of, names))
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?", walk)
    assert len(named) >= 8
    assert [file for file, _ in named if file not in run] == []
    for file, function in named:
        text = Path(ROOT, "src", "longshore", file).read_text()
        for part in function.split(".") if function else ():
            assert re.search(rf"\b(?:class|def) {part}\b", text), f"{file} has no {function}"
