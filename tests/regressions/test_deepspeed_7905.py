"""deepspeedai/DeepSpeed issue 7905: with SuperOffload and more than one parameter group (the usual split into
parameters with and without weight decay), the first backward ended in a KeyError: a table over the parts of all
groups was filled with indices that began anew in each group. Its mend (pull request 7906) also had to make each part
remember the options of its group.

Here the parts of all groups have numbers of their own, a tile may hold parts of several groups, and each part is
stepped with the options of its own group.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.scenarios import SCENARIOS, MultiTask, Scenario
from ranks import Ranks

from regressions.training import compared, zero


def decayed_and_not(model: MultiTask) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.3},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


GROUPS = {"decayed and not": decayed_and_not, "different": SCENARIOS["groups that differ in everything"].groups}


def case(groups: str, stage: int, bucket_numel: int, tile_numel: int) -> None:
    scenario = Scenario(groups=GROUPS[groups], steps=3, tile_numel=tile_numel)
    with compared(scenario, zero(stage, reduce_bucket_size=bucket_numel)) as comparison:
        tiles = comparison.engine.explain(False).tiles
        assert tiles == 1 if tile_numel > 10_000 else tiles > 10
        comparison.run()


@pytest.mark.parametrize("tile_numel", [100, 100_000])
@pytest.mark.parametrize("groups", GROUPS)
def test_any_number_of_groups(groups: str, tile_numel: int) -> None:
    case(groups, 2, 1500, tile_numel)


@pytest.mark.parametrize("groups, stage, bucket_numel", [("decayed and not", 2, 200), ("different", 1, 100_000)])
def test_on_two_ranks(two_ranks: Ranks, groups: str, stage: int, bucket_numel: int) -> None:
    two_ranks(case, groups, stage, bucket_numel, tile_numel=100)
