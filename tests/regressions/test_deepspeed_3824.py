"""deepspeedai/DeepSpeed issue 3824: where layers share a weight, the full float32 weights that were made of a sharded
checkpoint lacked it under all names but one, and ``load_state_dict()`` of the model failed for missing keys.

Here the full weights at stage 3 have every name of the plain model, a fresh model takes them as they are and is tied
as before, and the float32 master is found by each of the names.
"""

from __future__ import annotations

import pytest
import torch
from engine.fully_sharded_cases import beside, make_tower
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longshore import utils


def case(dtype: torch.dtype, units: tuple[str, ...]) -> None:
    with beside(dtype, wrap_policy=(lambda name, _: name in units) if units else None) as pair:
        for step in range(3):
            pair.train(step)
        masters = dict(zip(map(id, pair.loop.parameters), pair.loop.masters, strict=True))
        for (name, ours), (_, theirs) in zip(
            pair.model.named_parameters(remove_duplicate=False),
            pair.twin.named_parameters(remove_duplicate=False),
            strict=True,
        ):
            master = utils.safe_get_full_fp32_param(ours)
            if theirs.numel():
                assert master is not None and torch.equal(master.view(-1), masters[id(theirs)][: theirs.numel()]), name
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(pair.model, options=options)
        if pair.rank > 0:
            return  # the first one has them
        assert {"head.weight", "embedding.weight"} <= weights.keys() == pair.twin.state_dict().keys()
        fresh = make_tower(dtype)
        fresh.load_state_dict(weights)
        assert fresh.head.weight is fresh.embedding.weight
        for name, expected in pair.twin.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], expected), name


@pytest.mark.needs_torch("stage 3")
@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("units", [(), ("head", "blocks.1"), ("embedding", "head")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_weights_of_tied_layers(dtype: torch.dtype, units: tuple[str, ...], two_ranks: Ranks) -> None:
    two_ranks(case, dtype, units)
