"""The one-line optimizer in torch's own distributed stack, beside torch's optimizer in the same script."""

from __future__ import annotations

from typing import Any

import pytest
from optim import distributed_cases as cases
from ranks import Ranks

_QUICK = ("FSDP2", "TP with sequence parallel", "1F1B", "DDP")


def _rows(quick: tuple[str, ...], modes: tuple[str, ...], of_four: bool) -> list[Any]:
    return [
        pytest.param(layout, mode, marks=[] if layout in quick and mode in modes else pytest.mark.slow)
        for layout in cases.LAYOUTS
        for mode in cases.MODES
        if of_four or layout not in cases.OF_FOUR
        if not (mode.startswith("released") and layout.startswith(("DDP", "GPipe, scaled")))  # refused by name
    ]


BACKWARDS = pytest.mark.parametrize("backwards", [1, 2])
KINDS = pytest.mark.parametrize("kind", ["AdamW", "Adam"])


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@BACKWARDS
@KINDS
@pytest.mark.parametrize("layout, mode", _rows(_QUICK, cases.MODES, of_four=False))
def test_two_ranks(layout: str, mode: str, backwards: int, kind: str, two_ranks: Ranks) -> None:
    two_ranks(cases.trained, layout, mode, backwards, kind)


@pytest.mark.covering(1)
@pytest.mark.medium
@BACKWARDS
@KINDS
@pytest.mark.parametrize("layout, mode", _rows(("TP with sequence parallel + FSDP2",), ("released",), of_four=True))
def test_four_ranks(layout: str, mode: str, backwards: int, kind: str, four_ranks: Ranks) -> None:
    four_ranks(cases.trained, layout, mode, backwards, kind)


@pytest.mark.needs_torch("GPipe that scales gradients last")
def test_a_schedule_that_scales_gradients_is_refused_by_name(two_ranks: Ranks) -> None:
    """With ``release_gradients=True``: ``scale_grads=False`` is right. For DDP, see test_wrappers.py."""
    for said in two_ranks(cases.scaled_by_torch):
        held = "its gradient is on the host (as under every engine, and with release_gradients=True)"
        assert f"{held}, and div_ asked for it" in said


@pytest.mark.medium
def test_sums_over_ranks_are_reduced_once_a_step(two_ranks: Ranks) -> None:
    """Each rank adds its addends of two backwards, as autograd does; reducing each would round otherwise."""
    two_ranks(cases.trained, "TP with sequence parallel", "released", 2, "AdamW")
