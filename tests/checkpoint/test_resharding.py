"""Saved by some ranks, loaded by others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from checkpoint import resume_cases as cases
from checkpoint.resume_cases import Setting

COUNTS = (1, 2, 3, 4)
COUNT_PAIRS = [
    pytest.param(*pair, marks=pytest.mark.slow if 4 in pair else []) for pair in itertools.permutations(COUNTS, 2)
]
RunOn = Callable[..., list[Any]]


def check(run_on: RunOn, saving: int, first: Setting, loading: int, second: Setting, folder: Path) -> None:
    saved = run_on(saving, cases.save_whole, first, str(folder))
    for found in run_on(loading, cases.load_whole, second, str(folder)):
        cases.check_same(found, saved[0], but=("norm",))


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize(("saving", "loading"), COUNT_PAIRS)
def test_every_number_of_ranks(saving: int, loading: int, run_on: RunOn, tmp_path: Path) -> None:
    """Of stages, places and tiles that differ, too."""
    first = Setting((saving + loading) % 4, ("cpu", "simulated", "none")[saving % 3])
    second = Setting((saving * loading) % 4, ("cpu", "split")[loading % 2], tile_numel=9 * loading)
    check(run_on, saving, first, loading, second, tmp_path)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("second_stage", range(4))
@pytest.mark.parametrize("first_stage", range(4))
@pytest.mark.parametrize("turn", range(4))
def test_every_stage(turn: int, first_stage: int, second_stage: int, run_on: RunOn, tmp_path: Path) -> None:
    """Every two stages, every two numbers of ranks."""
    saving, loading = COUNTS[(turn + first_stage) % 4], COUNTS[(turn + 2 * first_stage + second_stage) % 4]
    check(run_on, saving, Setting(first_stage), loading, Setting(second_stage, tile_numel=11), tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (3, 2), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_large_tensors_are_shared_out(saving: int, loading: int, run_on: RunOn, tmp_path: Path) -> None:
    saved = run_on(saving, cases.save_shared_out, Setting(saving % 3), str(tmp_path))
    for found in run_on(loading, cases.load_whole, Setting(), str(tmp_path)):
        cases.check_same(found, saved[0], but=("norm",))
    tensors = json.loads((tmp_path / "global_step4/metadata.json").read_text())["tensors"]
    files = {len({chunk["file"] for chunk in each["chunks"]}) for name, each in tensors.items() if "model." in name}
    assert files == {1, saving}


@pytest.mark.medium
def test_what_other_ranks_cannot_have_is_said(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.save_whole, Setting(), str(tmp_path))
    said = three_ranks(cases.warned, Setting(), str(tmp_path))
    where = str(tmp_path / "global_step4")
    repeated = "the run was 16 samples into its epoch, which is in the middle of a batch of 2 on each of 3 ranks"
    assert said[0] == [
        f"{repeated}: the last 4 come again",
        f"{where} was saved by 2 ranks, and these are 3: random numbers (dropout), the split of batches over ranks "
        "and the order in which their gradients are added differ from that run; everything else is as another "
        "warning says",
        f"{where} was saved with other settings, and the weights will be those of neither run: backwards a step (ranks "
        "times gradient_accumulation_steps) 2 * 1 there, 3 * 1 here. Give initialize() the configuration of that run, "
        "if this is to continue it",
    ]
    assert said[1:] == [[f"{repeated}: the last 4 come again"]] * 2
    assert two_ranks(cases.warned, Setting(1), str(tmp_path)) == [[], []]
