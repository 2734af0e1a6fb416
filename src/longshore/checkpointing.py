"""Activation checkpointing with the calls of ``deepspeed.checkpointing``; honours ``cpu_checkpointing``."""

from longshore.compat.activation_checkpointing import configure
from longshore.engine.activation_checkpointing import checkpoint, held_host_bytes, is_configured, reset

__all__ = ["checkpoint", "configure", "held_host_bytes", "is_configured", "reset"]
