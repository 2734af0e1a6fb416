"""Second derivatives: the weights are the plain loop's, or it is an error."""

from __future__ import annotations

import pytest
import torch
from ranks import RankFailure, Ranks

from engine.create_graph_cases import LOOPS, trains
from engine.failure_cases import make_engine
from engine.scenarios import HEADS, inputs
from longshore.errors import LongshoreError


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("by_engine", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_train_like_plain_torch(stage: int, name: str, by_engine: bool, two_ranks: Ranks) -> None:
    arguments = (trains, stage, name, by_engine, 0.01 if by_engine else None)
    if stage == 3 and name.startswith("penalty"):
        # FSDP2 has let go of the parameters that a second derivative needs; some kernels of torch crash then.
        with pytest.raises(
            RankFailure, match=r"RuntimeError: setStorage: .* out of bounds for storage of size 0|ended"
        ):
            two_ranks(*arguments)
    else:
        two_ranks(*arguments)


@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("by_engine", [False, True])
def test_one_rank_trains_like_plain_torch(name: str, by_engine: bool) -> None:
    trains(2, name, by_engine, None if by_engine else 0.01)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_a_loss_of_released_gradients_is_an_error_by_name() -> None:
    engine = make_engine(2)
    try:
        engine(inputs(0, 0, 0, torch.float32), HEADS).backward(create_graph=True)
        with pytest.raises(LongshoreError, match=r"first\.weight: its gradient is on the host \(.*\), and pow asked"):
            engine.module.first.weight.grad.pow(2)
    finally:
        engine.destroy()
