"""Calls of DeepSpeed's engine that this one has not, and what to call instead."""

from __future__ import annotations

_WHOLE = "torch.distributed.checkpoint.state_dict.get_model_state_dict, on every rank, gives whole weights"
_STATES = (
    "call state_dict() and load_state_dict() of engine.module, of the optimizer and of the scheduler, "
    "on every rank and with a file for each"
)
INSTEAD = {
    "save_checkpoint": _STATES,
    "load_checkpoint": _STATES,
    "save_16bit_model": _WHOLE,
    "save_fp16_model": _WHOLE,
    "_zero3_consolidated_16bit_state_dict": _WHOLE,
}
"""Of calls that a DeepSpeed script has."""
