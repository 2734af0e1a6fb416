"""DistributedDataParallel and its kin reduce gradients themselves: understood, or refused by name."""

from __future__ import annotations

import pytest
from optim import wrapper_cases
from ranks import Ranks


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_ddp(view: bool, after: bool, two_ranks: Ranks) -> None:
    two_ranks(wrapper_cases.ddp, view, after)


def test_fsdp1(two_ranks: Ranks) -> None:
    two_ranks(wrapper_cases.fsdp1)


@pytest.mark.parametrize(("fsdp", "inside"), [(False, False), (False, True), (True, True)])
def test_an_engine(fsdp: bool, inside: bool, two_ranks: Ranks) -> None:
    two_ranks(wrapper_cases.engine, fsdp, inside)
