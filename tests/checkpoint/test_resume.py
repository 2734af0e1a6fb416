"""A run that was interrupted and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ranks import Ranks

from checkpoint import resume_cases as cases
from checkpoint.resume_cases import Setting

FEW = [
    (Setting(0), Setting(0, tile_numel=1000)),
    (Setting(1, "none", dtype="fp32"), Setting(1, "simulated", dtype="fp32", ahead=True)),
    (Setting(2, "split"), Setting(2, "cpu", ahead=True)),
    (Setting(3, "simulated", ahead=True), Setting(3, "cpu", tile_numel=7)),
]
ALL = [
    (Setting(stage, place, dtype=dtype, ahead=number % 2 == 0), Setting(stage, other, 11, dtype, number % 2 == 1))
    for stage in range(4)
    for number, (place, other) in enumerate(itertools.permutations(("none", "cpu", "simulated", "split"), 2))
    for dtype in ("fp32", "bf16")
]


def check(ranks: Ranks | None, first: Setting, second: Setting, folder: Path) -> None:
    """On ``ranks``, or in this process."""
    if ranks is None:
        went = [cases.save_and_go_on(first, str(folder), 3, 3)]
        resumed = [cases.load_and_go_on(second, str(folder), 3)]
    else:
        went = ranks(cases.save_and_go_on, first, str(folder), 3, 3)
        resumed = ranks(cases.load_and_go_on, second, str(folder), 3)
    for one, other in zip(went, resumed, strict=True):
        cases.check_same(other["loaded"], one["saved"], but=("norm",))
        cases.check_same(other["end"], one["end"])


@pytest.mark.parametrize(("first", "second"), FEW)
def test_two_ranks(first: Setting, second: Setting, two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, first, second, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), ALL)
def test_two_ranks_all(first: Setting, second: Setting, two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, first, second, tmp_path)


@pytest.mark.parametrize(("first", "second"), [FEW[1], FEW[2], (Setting(accumulation=3), Setting(0, accumulation=3))])
def test_one_rank(first: Setting, second: Setting, tmp_path: Path) -> None:
    check(None, first, second, tmp_path)


@pytest.mark.parametrize("optimizer", ["Adam", "Lion", "Adagrad", "SGD", "RMSprop", "NAdam"])
@pytest.mark.filterwarnings("ignore:torch.optim.* has no kernel")
def test_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    setting = Setting(optimizer=optimizer, dtype="bf16")
    check(None, setting, setting._replace(tile_numel=9), tmp_path)
