"""The other processes of a job: meetings at which each announces its next action, exchanges, and presence."""

from __future__ import annotations

from collections.abc import Callable

on_made: list[Callable[[], object]] = []
"""Functions that are called after each optimizer that is made."""
