"""Checkpoints of every released version load, and training goes on with the bits that it had then.

``write_golden.py`` made them. A checkpoint that no longer loads is a bug of the version that reads it.
"""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from ranks import Ranks
from torch import Tensor

import longshore
from checkpoint import golden_cases as cases

LOOPS = sorted(path.parent for path in cases.GOLDEN.glob("*/*/checkpoint") if path.parent.name in cases.LOOPS)
ENGINES = sorted(path.parent for path in cases.GOLDEN.glob("*/*/checkpoint") if path.parent.name in cases.ENGINES)


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def check(folder: Path, when: str, found: dict[str, Tensor]) -> None:
    expected = json.loads((folder / "expected.json").read_text())[when]
    assert cases.digests(found) == expected


def test_every_version_has_all() -> None:
    """A released version keeps its cases, and the present one has all of them."""
    kept = {(path.parent.parent.name, path.parent.name) for path in cases.GOLDEN.glob("*/*/checkpoint")}
    assert len(kept) == len(LOOPS) + len(ENGINES), "a case that was kept has no name in golden_cases any more"
    version = metadata.version("longshore")
    assert {case for each, case in kept if each == version} == {*cases.LOOPS, *cases.ENGINES}, (
        f"run write_golden.py for version {version}"
    )


@pytest.mark.parametrize("folder", LOOPS, ids=name_of)
def test_loops(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    model, optimizer = cases.loop_of(folder.name)
    cases.train_loop(model, optimizer, 50, 1)
    assert longshore.load(copied, model, optimizer) == {"said": "kept"}
    check(folder, "loaded", cases.found_in_loop(model, optimizer))
    if folder.name not in cases.WITHOUT_MORE:
        cases.train_loop(model, optimizer, cases.STEPS, cases.MORE)
        check(folder, "continued", cases.found_in_loop(model, optimizer))


@pytest.mark.parametrize("folder", ENGINES, ids=name_of)
def test_engines(folder: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    copied = shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    alone = cases.ENGINES[folder.name]["ranks"] == 1
    results = (
        [cases.read_engine(folder.name, str(copied))]
        if alone
        else two_ranks(cases.read_engine, folder.name, str(copied))
    )
    for before, after in results:
        check(folder, "loaded", before)
        check(folder, "continued", after)
