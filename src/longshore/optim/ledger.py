"""What became of every gradient of a window: produced, reduced, applied."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from longshore.errors import LongshoreError
from longshore.host import ParameterStore
from longshore.optim.parameters import ParameterRecord


class Entry(NamedTuple):
    """One parameter's account of a window."""

    name: str
    arrived: int
    """Gradients that backward produced on this rank."""
    reduced: int | None
    """Gradients, each of all ranks together, that reached what this rank steps; None: it steps nothing of this one."""
    applied: int
    """Steps that were made with them."""


def balance(
    records: Iterable[ParameterRecord],
    produced: Mapping[int, int],
    stepped: Collection[int],
    store: ParameterStore,
) -> dict[int, Entry]:
    """The accounts of a window that is about to be stepped.

    Raises:
        LongshoreError: a gradient was produced and would not be applied; nothing was stepped.
    """
    entries = {}
    for record in records:
        index = record.index
        arrived = produced.get(index, 0)
        reduced = store.reduced(index) if index in store else 0
        applied = int(index in stepped)
        lost = arrived > 0 and not applied
        missing = applied and reduced == 0 and arrived > 0 and record.parameter.numel() > 0
        if lost or missing:
            raise LongshoreError(
                f"parameter {record.name}: {arrived} gradients arrived in this window, {reduced} reached the step, and "
                f"{applied} steps would be made. Nothing was stepped. This is a bug in longshore: please report it; "
                "zero_grad() discards the window"
            )
        entries[index] = Entry(record.name, arrived, reduced, applied)
    return entries
