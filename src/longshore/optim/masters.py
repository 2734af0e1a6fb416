"""Law 10: the parameter is the user's. What was written since it was published becomes its master."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from longshore.errors import ParameterError
from longshore.host import ParameterStep, ParameterStore, debugging
from longshore.optim.family import History
from longshore.optim.parameters import ParameterRecord, check_no_shared_memory


def adopt_masters(
    store: ParameterStore, records: Collection[ParameterRecord], steps: Mapping[int, ParameterStep]
) -> None:
    """Take up, before a step, what somebody else wrote into the parameters that it steps.

    Raises:
        ParameterError: with ``LONGSHORE_DEBUG=1``, a write that torch cannot see, by name.
        ValueError: two parameters were given the same memory, by name.
    """
    if debugging():
        store.check_same({record.name: record.values() for record in records})
        _check_unseen_writes(store, records)
    changed = [record for record in records if record.index in steps and record.changed]
    if any(record.published is not None for record in changed):
        # p.data = q.data: two masters for the same memory.
        check_no_shared_memory(list(records))
    for record in changed:
        store.adopt(record.index, steps[record.index].target, keep_matching=record.has_master)
        record.has_master = True


def _check_unseen_writes(store: ParameterStore, records: Collection[ParameterRecord]) -> None:
    for record in records:
        if not record.has_master or record.changed:
            continue
        differing = store.count_differing(record.index, record.values())
        if differing:
            raise ParameterError(
                f"parameter {record.name}: {differing} of {record.parameter.numel()} elements were written where "
                "torch could not see it (p.data.copy_, NumPy, a custom kernel); call "
                "optimizer.refresh_master() after such writes"
            )


def refresh_masters(store: ParameterStore, records: Collection[ParameterRecord]) -> None:
    """Every element that is not the rounded master becomes the master."""
    for record in records:
        if record.has_master:
            record.check()
            store.adopt(record.index, record.values(), keep_matching=True)
            record.mark_published()


def publish(record: ParameterRecord, step: ParameterStep, history: History) -> None:
    """The parameter has the new values (law 4), and this history."""
    held, leaf = record.held, record.leaf()
    if step.target.data_ptr() != held.data_ptr() and held.numel() > 0:
        held.copy_(step.target.view(held.shape))  # it is not contiguous
    else:
        # A graph that was recorded before must not run backward on new
        # weights: torch's own check finds the version changed.
        torch.autograd.graph.increment_version(record.parameter)
    if leaf is not None and leaf is not record.parameter:
        torch.autograd.graph.increment_version(leaf)
    record.history = history
    record.has_state = True
    record.mark_published()
