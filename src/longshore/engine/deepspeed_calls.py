"""Calls of DeepSpeed's engine that this one has not, and what to call instead."""

from __future__ import annotations

_WHOLE = "torch.distributed.checkpoint.state_dict.get_model_state_dict, on every rank, gives whole weights"
INSTEAD = {
    "save_16bit_model": _WHOLE,
    "save_fp16_model": _WHOLE,
    "_zero3_consolidated_16bit_state_dict": _WHOLE,
}
"""Of calls that a DeepSpeed script has."""
