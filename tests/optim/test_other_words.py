"""Arguments of torchao's, bitsandbytes' and lion-pytorch's optimizers are refused with the words for them here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import small_model

import longshore


@pytest.mark.parametrize(
    ("kind", "options", "here"),
    [
        (longshore.AdamW, {"offload_gradients": True}, "release_gradients"),
        (longshore.AdamW, {"optim_bits": 8}, "float32"),
        (longshore.Adam, {"is_paged": True}, "host memory"),
        (longshore.AdamW, {"percentile_clipping": 5}, "clip_grad_norm_"),
        (longshore.Lion, {"block_wise": True}, "float32"),
        (longshore.Lion, {"min_8bit_size": 4096}, "float32"),
        (longshore.SGD, {"args": None}, "8-bit"),
        (longshore.Lion, {"use_triton": True}, "Triton"),
        (longshore.Lion, {"decoupled_weight_decay": True}, "divided by the first lr"),
        (longshore.AdamW, {"optimizer_class": torch.optim.AdamW}, "longshore.from_client"),
    ],
)
def test_words_of_others(kind: Any, options: dict[str, Any], here: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no .*{here}"):
        kind(small_model().parameters(), **options)


def test_a_class_as_second_argument() -> None:
    with pytest.raises(TypeError, match="takes no optimizer class"):
        longshore.AdamW(small_model().parameters(), torch.optim.AdamW)  # pyright: ignore[reportArgumentType]


def test_own_words_are_taken() -> None:
    optimizer = longshore.Adam(small_model().parameters(), 1e-3, decoupled_weight_decay=True)
    assert copy.deepcopy(optimizer).param_groups[0]["decoupled_weight_decay"] is True
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        longshore.Adam(small_model().parameters(), learning_rate=1e-3)  # pyright: ignore[reportCallIssue]
