"""deepspeedai/DeepSpeed issue 3539: under ZeRO-3 a second ``loss.backward()`` of the same loss (``retain_graph=True``
for the first) failed in a size mismatch: parameters that the first had let go of were not gathered again.

Here they are, block by block, and both backwards count towards the step.
"""

from __future__ import annotations

import pytest
from engine.fully_sharded_cases import beside, config_of, words_of
from ranks import Ranks


def case(stage: int, raw: bool) -> None:
    with beside(config=config_of(stage=stage)) as pair:
        gathered = []
        pair.model.blocks[1].down.register_full_backward_hook(
            lambda module, *_: gathered.append(module.weight.shape == (5, 7))
        )
        for step in range(3):
            loss = pair.engine(words_of(step, pair.rank))
            for keep in (True, False):
                if raw:
                    loss.backward(retain_graph=keep)
                else:
                    pair.engine.backward(loss, retain_graph=keep)
                assert stage < 3 or pair.model.blocks[1].down.weight.to_local().shape[0] < 5, "it is let go of"
            pair.engine.step()
            pair.plain(lambda model, rank, step=step: [model(words_of(step, rank))] * 2)
            pair.check(f"step {step}")
        assert gathered == [True] * 6


@pytest.mark.quick(0)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_loss_twice(stage: int, raw: bool, two_ranks: Ranks) -> None:
    two_ranks(case, stage, raw)
