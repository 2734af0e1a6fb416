"""Adoption, before a step, of writes to parameters that are not this optimizer's (law 10)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from longshore.errors import ParameterError, debugging
from longshore.kernels import checksums_on
from longshore.optim.parameters import Identity, ParameterRecord, check_no_shared_memory, check_parameter
from longshore.store import Store
from longshore.tiles import ParameterStep


class WriteDetector:
    """Record of the last published values, by which later writes of others are found.

    The identity of a parameter shows the writes that torch knows of. Kernels that write parameters in place compare
    each element with its rounded master. Where new values are copied to a device, checksums there show other writes.

    Args:
        detect_writes: whether to look for writes that torch cannot see.
    """

    def __init__(self, detect_writes: bool) -> None:
        self._detects = detect_writes
        self._sums = torch.empty(0, dtype=torch.int64, device="cpu")
        """Checksums on the parameters' device, by index of the record."""
        self._last_rows: tuple[list[int], Tensor] | None = None
        """What :meth:`_rows` was called with last, and returned."""
        self._identities: dict[int, Identity | None] = {}
        """:attr:`ParameterRecord.published` of the values that a checksum is of, by index."""

    def adopt(self, store: Store, records: Collection[ParameterRecord], steps: Mapping[int, ParameterStep]) -> None:
        """Make values that others wrote to the parameters in ``steps`` their masters.

        Raises:
            ParameterError: with ``LONGSHORE_DEBUG=1``, torch cannot see a write, and ``detect_writes`` is False.
            ValueError: a parameter was given memory that cannot be stepped (expanded, or another parameter's).
        """
        if debugging() and not self._detects:
            _check_no_writes(store, records)
        changed, others = [], []
        for record in records:
            if record.index in steps:
                (changed if record.changed else others).append(record)
        for record in changed:
            check_parameter(record.parameter, record.name, record.device, shards=True)
        if any(record.published is not None for record in changed):
            # After p.data = q.data there would be two masters for the same memory.
            check_no_shared_memory(list(records))
        if self._uses_checksums(store) and others:
            written = self._written(others, steps)
            for record in written:
                record.published = None  # until it is published, it differs for everyone
            changed += written
        for record in changed:
            store.states.adopt(record.index, steps[record.index].target, keep_matching=record.has_master)
            record.has_master = True

    def published(
        self, store: Store, records: Mapping[int, ParameterRecord], steps: Mapping[int, ParameterStep]
    ) -> None:
        """Take checksums of the values published by ``steps``, in the order of the current stream; ``records`` has the
        records by index."""
        if not steps or not self._uses_checksums(store):
            return
        sums = _checksums(steps[index].target for index in steps)
        most = 1 + max(steps)
        if len(self._sums) < most:
            former, self._sums = self._sums, torch.zeros(most, dtype=torch.int64, device=sums.device)
            self._sums[: len(former)] = former
        self._sums[self._rows(list(steps), sums.device)] = sums
        self._identities.update((index, records[index].published) for index in steps)

    def _uses_checksums(self, store: Store) -> bool:
        return self._detects and store.tiles.streams.publishes

    def _written(self, records: Sequence[ParameterRecord], steps: Mapping[int, ParameterStep]) -> list[ParameterRecord]:
        """Return the records whose values are not known to be those that were published. One pass reads all of them,
        and the host waits once."""
        known, unknown = [], []
        for record in records:
            (known if self._identities.get(record.index) is record.published else unknown).append(record)
        if not known:
            return unknown
        sums = _checksums(steps[record.index].target for record in known)
        differs = self._sums[self._rows([record.index for record in known], sums.device)] != sums
        return unknown + [record for record, wrote in zip(known, differs.tolist(), strict=True) if wrote]

    def _rows(self, indices: list[int], device: torch.device) -> Tensor:
        """Return indices of :attr:`_sums`, on the device. Those of the last call stay there: most steps have the same,
        and the host need not wait for another copy."""
        if self._last_rows is None or self._last_rows[0] != indices or self._last_rows[1].device != device:
            self._last_rows = indices, torch.tensor(indices, device="cpu").to(device)
        return self._last_rows[1]


def _checksums(values: Iterable[Tensor]) -> Tensor:
    tensors = list(values)
    return checksums_on(tensors[0].device)(tensors)


def _check_no_writes(store: Store, records: Collection[ParameterRecord]) -> None:
    for record in records:
        if not record.has_master or record.changed:
            continue
        if differing := store.states.count_differing(record.index, record.values()):
            raise ParameterError(
                f"parameter {record.name}: {differing} of {record.parameter.numel()} elements were written where torch "
                "could not see it (p.data.copy_, NumPy, a custom kernel), and detect_writes=False does not look for "
                "that; leave it out, or call optimizer.refresh_master() after such writes"
            )
