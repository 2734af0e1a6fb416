"""A checkpoint says which arithmetic and which processor it is of, and a run that moves between two says so."""

from __future__ import annotations

import json
import platform
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import longshore
from checkpoint import golden_cases as cases
from longshore.checkpoint.inspection import inspect
from longshore.kernels import ARITHMETIC

CASE = "adamw"


def changed(folder: Path, **entries: Any) -> None:
    """Give the manifest other entries; None removes one."""
    file = folder / "last" / "manifest.json"
    manifest = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


def saved(folder: Path) -> Path:
    model, optimizer = cases.loop_of(CASE)
    cases.train_loop(model, optimizer, 0, 1)
    longshore.save(folder, model, optimizer)
    return folder


def said_when_loading(folder: Path) -> list[str]:
    model, optimizer = cases.loop_of(CASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        longshore.load(folder, model, optimizer)
    return [str(each.message) for each in caught]


def test_it_is_in_the_manifest_and_in_what_is_inspected(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest = json.loads((folder / "last" / "manifest.json").read_text())
    assert (manifest["arithmetic"], manifest["processor"]) == (ARITHMETIC, platform.machine())
    found = inspect(folder).checkpoint
    assert found is not None and (found.arithmetic, found.processor) == (ARITHMETIC, platform.machine())
    assert said_when_loading(folder) == []


def test_a_checkpoint_of_0_1_0_is_of_version_1_and_of_an_unknown_processor(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cases.GOLDEN / "0.1.0" / CASE / "checkpoint", tmp_path / "checkpoint"))
    assert not {"arithmetic", "processor"} & {*json.loads((folder / "last" / "manifest.json").read_text())}
    found = inspect(folder).checkpoint
    assert found is not None and (found.arithmetic, found.processor) == (1, None)
    assert said_when_loading(folder) == []


@pytest.mark.parametrize(
    "entries, said",
    [
        ({"arithmetic": ARITHMETIC + 1}, f"version {ARITHMETIC + 1} of the arithmetic"),
        ({"processor": "s390x"}, "s390x"),
    ],
)
def test_another_one_is_said_in_one_warning(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    folder = saved(tmp_path)
    changed(folder, **entries)
    (text,) = said_when_loading(folder)
    assert said in text and "\n" not in text


def test_weights_alone_say_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    changed(folder, processor="s390x", arithmetic=ARITHMETIC + 1)
    model, _ = cases.loop_of(CASE)
    longshore.load(folder, model)  # a warning would be an error
