"""Activation checkpointing with the calls of ``deepspeed.checkpointing``; honours ``cpu_checkpointing``."""

from longshore.engine.activation_checkpointing import checkpoint, configure, held_host_bytes, is_configured, reset

__all__ = ["checkpoint", "configure", "held_host_bytes", "is_configured", "reset"]
