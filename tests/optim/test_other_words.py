"""Arguments of torchao's, bitsandbytes' and lion-pytorch's optimizers are refused with the words for them here."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from support import small_model

import longshore


@pytest.mark.parametrize(
    ("kind", "options", "here"),
    [
        (longshore.AdamW, {"offload_gradients": True}, "release_gradients"),
        (longshore.AdamW, {"optim_bits": 8}, r"Offload\(states="),
        (longshore.Adam, {"is_paged": True}, "host memory"),
        (longshore.AdamW, {"percentile_clipping": 5}, "clip_grad_norm_"),
        (longshore.Lion, {"block_wise": True}, r"Offload\(states="),
        (longshore.Lion, {"min_8bit_size": 4096}, r"Offload\(states="),
        (longshore.SGD, {"args": 1}, "8-bit"),
        (longshore.AdamW, {"optim_bits": 32.0}, r"Offload\(states="),
        (longshore.Adam, {"states": "8bit"}, r"Offload\(states="),
        (longshore.AdamW, {"block_size": 256}, r"Offload\(states="),
        (longshore.AdamW, {"bf16_stochastic_round": True}, "rounded to the nearest"),
        (longshore.Adam, {"adam_w_mode": True}, "longshore.AdamW"),
        (longshore.AdamW, {"correct_bias": False}, "bias_correction"),
        (longshore.Lion, {"use_triton": True}, "Triton"),
        (longshore.AdamW, {"use_triton": False}, "Triton"),
        (longshore.AdamW, {"decoupled_weight_decay": False}, "weight_decay"),
        (longshore.Lion, {"decoupled_weight_decay": True}, "divided by the first lr"),
        (longshore.AdamW, {"optimizer_class": torch.optim.AdamW}, "longshore.from_client"),
    ],
)
def test_words_of_others(kind: Any, options: dict[str, Any], here: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no .*{here}"):
        kind(small_model().parameters(), **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (longshore.AdamW, {"args": None, "optim_bits": 32, "percentile_clipping": 100}),
        (longshore.SGD, {"args": None}),
        (longshore.Adam, {"bf16_stochastic_round": False}),
        (longshore.Lion, {"use_triton": False, "decoupled_weight_decay": False}),
    ],
)
def test_what_asks_for_what_is_done_anyway_is_taken(kind: Any, options: dict[str, Any]) -> None:
    optimizer = kind(small_model().parameters(), 1e-3, **options)
    assert not options.keys() & optimizer.param_groups[0].keys()
    assert not options.keys() & inspect.signature(kind).parameters.keys()

    class Own(kind):
        pass

    Own(small_model().parameters(), 1e-3, **options)


def test_lion_decays_as_lion_pytorch_does_by_default() -> None:
    """Its README divides the decay by the first rate for ``decoupled_weight_decay=True`` only."""
    parameter = torch.torch.nn.Parameter(torch.ones(4))
    optimizer = longshore.Lion(  # pyright: ignore[reportCallIssue]
        [parameter], lr=0.5, weight_decay=0.25, decoupled_weight_decay=False
    )
    parameter.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(parameter, torch.full((4,), 1 - 0.5 * 0.25))


def test_a_class_as_second_argument() -> None:
    with pytest.raises(TypeError, match="takes no optimizer class"):
        longshore.AdamW(small_model().parameters(), torch.optim.AdamW)  # pyright: ignore[reportArgumentType]


def test_own_words_are_taken() -> None:
    optimizer = longshore.Adam(small_model().parameters(), 1e-3, decoupled_weight_decay=True)
    assert copy.deepcopy(optimizer).param_groups[0]["decoupled_weight_decay"] is True
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        longshore.Adam(small_model().parameters(), learning_rate=1e-3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("name", "value"), [("states", "bf16"), ("states_seed", 1), ("optim_bits", 8)])
def test_a_group_has_no_format_of_its_own(name: str, value: object) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    with pytest.raises(ValueError, match=f"a group has '{name}', and the states of all groups"):
        longshore.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], name: value}])
    optimizer = longshore.AdamW(parameters[:1])
    with pytest.raises(ValueError, match="have one format"):
        optimizer.add_param_group({"params": parameters[1:], name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": parameters[1:], "optim_bits": 32})


def test_a_subclass_takes_what_its_base_takes() -> None:
    class Own(longshore.Adam):
        pass

    optimizer = Own([torch.nn.Parameter(torch.ones(3))], decoupled_weight_decay=True)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
