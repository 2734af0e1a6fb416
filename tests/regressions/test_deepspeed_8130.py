"""deepspeedai/DeepSpeed pull request 8130: under ZeRO-3, activation checkpointing that is not reentrant and frozen
parameters (adapters on a frozen model) ended backward in a CheckpointError: the forward that recomputes let go of its
parameters in place, and the frozen ones among what it had recomputed had no elements any more.

Here a block's parameters stay while it is recomputed and differentiated, whichever of them are frozen.
"""

from __future__ import annotations

import pytest
from engine.fully_sharded_cases import Tower, beside, make_tower
from ranks import Ranks


def freeze(model: Tower, what: str) -> None:
    for number, block in enumerate(model.blocks):
        if what == "a part of each block":
            block.up.requires_grad_(False)
        elif what == "a block" and number == 1:
            block.requires_grad_(False)
        elif what == "all but an adapter":
            block.requires_grad_(False)
            block.scale.requires_grad_(True)
    model.embedding.requires_grad_(what != "all but an adapter")


def case(what: str) -> None:
    model = make_tower(recompute=False)
    freeze(model, what)
    with beside(model=model, model_parameters=list(model.parameters())) as pair:
        freeze(pair.twin, what)
        ran = []
        pair.model.blocks[2].down.register_forward_hook(lambda *_: ran.append(True))
        for step in range(3):
            pair.train(step)
        assert len(ran) == 6, "each forward is recomputed"
        stepped = {row.name for row in pair.engine.explain(False).parameters if row.applied}
        assert "blocks.1.up.weight" not in stepped and "blocks.2.scale" in stepped


@pytest.mark.quick(0)
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("what", ["a part of each block", "a block", "all but an adapter"])
def test_frozen_parameters_in_what_is_recomputed(what: str, two_ranks: Ranks) -> None:
    two_ranks(case, what)
