"""Recipes for Accelerate: the one-line optimizer in a loop that Accelerate prepares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

import longshore
from integrations.accelerate import cases


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.25}, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16", "clip": 0.25}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_process(options: dict[str, Any]) -> None:
    """Accumulation, clipping, mixed precision with a scaler, schedules, evaluation between steps."""
    cases.both(**options)


@pytest.mark.parametrize("kind", ["kept", "released"])
def test_the_prepared_optimizer_clips(kind: str) -> None:
    """By the call that the error of ``accelerator.clip_grad_norm_`` names where gradients are released."""
    expected, norms = cases.clipped_by_the_optimizer("plain", 0.25)
    found, mine = cases.clipped_by_the_optimizer(kind, 0.25)
    cases.check_equal(found, expected)
    assert mine == norms and min(norms) > 0.25


def test_clipping_that_cannot_see_released_gradients_names_the_call() -> None:
    with cases.fresh_accelerate():
        accelerator, model = cases.accelerator(), torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, cases.make_optimizer("released", model))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        named = re.escape("where Accelerate has prepared it: optimizer.optimizer.clip_grad_norm_()")
        with pytest.raises(longshore.LongshoreError, match=named):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert float(optimizer.optimizer.clip_grad_norm_(1.0)) > 1.0
        optimizer.step()


@pytest.mark.parametrize("kind", ["kept", "released"])
def test_resumes(kind: str, tmp_path: Path) -> None:
    cases.resumed(str(tmp_path), kind)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.25])
def test_ddp(clip: float | None, two_ranks: Ranks) -> None:
    two_ranks(cases.both, clip)


@pytest.mark.medium
@pytest.mark.parametrize("fsdp2", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_resume(fsdp2: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.resumed, str(tmp_path), "kept", fsdp2)


@pytest.mark.medium
@pytest.mark.parametrize(
    "kind, clip", [pytest.param("kept", None, marks=pytest.mark.slow), ("kept", 0.25), ("released", None)]
)
def test_fsdp2(kind: str, clip: float | None, two_ranks: Ranks) -> None:
    """Accelerate makes the optimizer first and the shards afterwards."""
    two_ranks(cases.on_fsdp2, kind, clip)


def test_nothing_but_longshore_differs() -> None:
    """The comparison would see a difference."""
    with pytest.raises(AssertionError):
        cases.check_equal({"a": torch.zeros(1)}, {"a": torch.ones(1)})


def test_deepspeeds_adam_does_not_take_the_place_of_ours() -> None:
    """Under a DeepSpeed file Accelerate makes it of whatever optimizer it is given, with another decay."""
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    optimizer = longshore.AdamW([torch.nn.Parameter(torch.ones(3))], weight_decay=0.1)
    with pytest.raises(ValueError, match=r"would replace longshore\.AdamW by DeepSpeed's Adam"):
        map_pytorch_optim_to_deepspeed(optimizer)
    assert optimizer.defaults["weight_decay"] == 0.1
