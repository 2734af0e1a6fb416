"""A run that was interrupted and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import errno
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
PLACES = list(itertools.permutations(("none", "cpu", "simulated", "split"), 2))
ALL = [(stage, *places, dtype) for stage, places, dtype in itertools.product(range(4), PLACES, ("fp32", "bf16"))]


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


@pytest.mark.medium
@pytest.mark.parametrize(
    ("first", "second"), [*(pytest.param(*row, marks=pytest.mark.slow) for row in FEW[:-1]), FEW[-1]]
)
def test_two_ranks(first: Setting, second: Setting, two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, first, second, tmp_path)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("stage", "place", "other", "dtype"), ALL)
def test_two_ranks_all(stage: int, place: str, other: str, dtype: str, two_ranks: Ranks, tmp_path: Path) -> None:
    ahead = PLACES.index((place, other)) % 2 == 0
    first, second = Setting(stage, place, dtype=dtype, ahead=ahead), Setting(stage, other, 11, dtype, not ahead)
    check(two_ranks, first, second, tmp_path)


@pytest.mark.parametrize(("first", "second"), [FEW[1], FEW[2], (Setting(accumulation=3), Setting(0, accumulation=3))])
def test_one_rank(first: Setting, second: Setting, tmp_path: Path) -> None:
    check(None, first, second, tmp_path)


@pytest.mark.quick(0)
@pytest.mark.parametrize("optimizer", ["Adam", "Lion", "Adagrad", "SGD", "RMSprop", "NAdam"])
@pytest.mark.filterwarnings("ignore:torch.optim.* has no kernel")
def test_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    setting = Setting(optimizer=optimizer, dtype="bf16")
    check(None, setting, setting._replace(tile_numel=9), tmp_path)


def test_half_of_a_checkpoint_is_not_trained_on(tmp_path: Path) -> None:
    saved = cases.save_whole(Setting(), str(tmp_path))
    cases.check_same(cases.fail_half_way(Setting(), str(tmp_path)), saved, but=("norm",))
    assert not (tmp_path / "half").exists()


@pytest.mark.medium
@pytest.mark.parametrize("setting", [pytest.param(Setting(2, "split"), marks=pytest.mark.slow), Setting(3)])
def test_nor_on_any_rank(setting: Setting, two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks(cases.save_whole, setting, str(tmp_path))
    for found in two_ranks(cases.fail_half_way, setting, str(tmp_path)):
        cases.check_same(found, saved[0], but=("norm",))


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_are_those_of_one_rank(stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks(cases.save_unlike_buffers, stage, str(tmp_path)):
        assert len(found) == 6 and all(bool((buffer == 1).all()) for buffer in found), found


@pytest.mark.medium
def test_broken_on_one_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks(cases.save_whole, Setting(), str(tmp_path))
    for found in two_ranks(cases.broken_on_one_rank, Setting(), str(tmp_path)):
        cases.check_same(found, saved[0], but=("norm",))


@pytest.mark.medium
def test_replaced_while_it_is_read(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks(cases.save_whole, Setting(), str(tmp_path))
    for found in two_ranks(cases.replaced_while_it_is_read, Setting(), str(tmp_path)):
        cases.check_same(found, saved[0], but=("norm",))


WRITTEN = pytest.mark.parametrize("at, what", [(1, "in place"), (20, "in place"), (20, "times"), (20, "links")])


@WRITTEN
def test_written_while_it_is_read(at: int, what: str, tmp_path: Path) -> None:
    saved = cases.save_whole(Setting(), str(tmp_path))
    found = cases.written_while_it_is_read(Setting(), str(tmp_path), at, what)
    cases.check_same(found, saved, but=("norm",))


@pytest.mark.medium
@WRITTEN
def test_written_while_ranks_read_it(at: int, what: str, two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks(cases.save_whole, Setting(), str(tmp_path))
    for found in two_ranks(cases.written_while_it_is_read, Setting(), str(tmp_path), at, what):
        cases.check_same(found, saved[0], but=("norm",))


def test_where_older_ones_cannot_be_removed_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    with cases.engine_of(Setting()) as engine:
        monkeypatch.setattr("longshore.checkpoint.saving.prune", refuse)
        with pytest.warns(UserWarning, match=r"older checkpoints in .* could not be removed \(Permission denied"):
            path = engine.save_checkpoint(tmp_path, keep_last=1)
        assert engine.load_checkpoint(tmp_path)[0] == path


def test_runs_that_begin_with_one_checkpoint_keep_each_others(tmp_path: Path) -> None:
    """Two fine-tuning runs in one folder, from one checkpoint of another folder."""
    with cases.engine_of(Setting()) as engine:
        engine.save_checkpoint(tmp_path / "base")
    tuned = tmp_path / "tuned"
    for name in ("a", "b"):
        with cases.engine_of(Setting()) as engine:
            engine.load_checkpoint(tmp_path / "base")
            for number in range(2):
                engine.save_checkpoint(tuned, f"{name}{number}", keep_last=1)
    assert sorted(path.name for path in tuned.iterdir()) == ["a1", "b1", "latest"]
    with cases.engine_of(Setting()) as engine:  # a run that goes on where it saved is the same run
        engine.load_checkpoint(tuned)
        engine.save_checkpoint(tuned, "b2", keep_last=1)
    assert sorted(path.name for path in tuned.iterdir()) == ["a1", "b2", "latest"]
