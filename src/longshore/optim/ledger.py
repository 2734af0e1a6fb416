"""Counts of gradients that arrived in a window, and of steps made with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from longshore.errors import LongshoreError
from longshore.optim.parameters import ParameterRecord
from longshore.store import Store


class Entry(NamedTuple):
    """Counts of one parameter's gradients in a window."""

    arrived: int
    """Gradients that backward produced on this rank."""
    reduced: int | None
    """Gradients (sums over all ranks) that reached this rank's step; None if it steps no part of the parameter."""
    applied: int
    """Steps made with these gradients."""


def balance(
    records: Iterable[ParameterRecord], produced: Mapping[int, int], stepped: Collection[int], store: Store
) -> dict[int, Entry]:
    """Return the entry of each parameter for a window that is about to be stepped. Raises LongshoreError, before
    anything is stepped, if a gradient was produced and would not be applied."""
    entries = {}
    for record in records:
        index = record.index
        arrived = produced.get(index, 0)
        reduced = store.reduced(index) if index in store else 0
        applied = int(index in stepped)
        missing = not applied or (reduced == 0 and record.parameter.numel() > 0)
        if arrived > 0 and missing:
            raise LongshoreError(
                f"parameter {record.name}: {arrived} gradients arrived in this window, {reduced} reached the step, and "
                f"{applied} steps would be made. Nothing was stepped. This is a bug in longshore: please report it; "
                "zero_grad() discards the window"
            )
        entries[index] = Entry(arrived, reduced, applied)
    return entries
