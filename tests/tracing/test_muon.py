"""A trace of Muon shows where matrices are made orthogonal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine import muon_cases as cases
from plain_muon import backward, build, groups_of
from ranks import Ranks
from support import same_weights

import longshore
from longshore.tiles.events import STEP_AHEAD, STEP_IN_PLACE, TRANSFORM

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")


def test_each_matrix_once_a_step() -> None:
    traced, plain = build(), build()
    offload = longshore.Offload(tile_numel=300, speculation_memory="100%")
    optimizers = [
        longshore.Muon(groups_of(model), lr=0.02, release_gradients=True, offload=offload) for model in (traced, plain)
    ]

    def train(windows: range) -> None:
        for step in windows:
            for model, optimizer in zip((traced, plain), optimizers, strict=True):
                backward(model, step)
                optimizer.step()

    train(range(2))
    with longshore.trace(optimizers[0]) as trace:
        train(range(2, 5))
    assert same_weights(traced, plain)
    tier = optimizers[0]._core.members.store.tiles.tier
    transforms = [event for event in trace.events if event.name == TRANSFORM]
    assert len(transforms) == 3 * len(tier.ranges)
    assert {event.track for event in transforms} == {"MainThread"}
    for name in (STEP_AHEAD, STEP_IN_PLACE):  # the passes before and after
        passes = [event.tile for event in trace.events if event.name == name]
        assert all(passes.count(tile.layout.index) == 3 for tile in tier.tiles if tile.arrays.of_matrices)
    seconds = sum(event.end_ns - event.begin_ns for event in transforms) / 1e9
    summary = trace.summary()
    assert summary.transform_s == pytest.approx(seconds / 3)
    assert "Newton-Schulz" in str(summary)


def test_none_without_muon() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = longshore.AdamW(model.parameters())
    with longshore.trace(optimizer) as trace:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert trace.summary().transform_s is None and "Newton-Schulz" not in str(trace.summary())


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_divide_the_work(stage: int, two_ranks: Ranks) -> None:
    """Where each rank has all of a matrix, each makes it orthogonal; otherwise one of them does."""
    (matrices, first), (_, second) = two_ranks(cases.transforms, stage)
    assert (first, second) == (matrices, matrices) if stage == 0 else first + second == matrices and min(first, second)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    optimizer = longshore.AdamW(torch.nn.Linear(4, 4).parameters())
    with longshore.trace(optimizer) as trace:
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="is no regular file, and is not replaced: give another name"):
        trace.save_chrome(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
