"""The model of the whole steps: a small Llama with random weights, and tokens for it. Knows nothing of longshore."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 16000


@dataclass(frozen=True)
class LlamaSize:
    """Dimensions, and the longest sequence."""

    hidden_size: int
    layers: int
    intermediate_size: int
    max_tokens: int


def make_llama(size: LlamaSize, device: str = "cpu") -> nn.Module:
    """In bfloat16, made on ``device``; the same weights every time. Needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden_size // 64,
        max_position_embeddings=size.max_tokens,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).bfloat16()


def make_tokens(tokens: int) -> Tensor:
    """int64 ``[1, tokens]``: inputs and labels; the same every time."""
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
