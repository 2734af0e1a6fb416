"""Memory that the ranks of one machine share, so that one of them reads what another one gathered."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longshore.sharding.lane import CollectiveLane

_FOLDER = Path("/dev/shm")
_PAGE = 1 << 16


class _Segment:
    """One file of this rank's, as memory."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.capacity = num_bytes
        self.memory = _mapped(path, num_bytes)
        self.last_meeting = -2
        self._user: StorageWeakRef | None = None

    def lend(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, whose storage says when it is no longer used."""
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self._user = StorageWeakRef(tensor.untyped_storage())
        return tensor

    @property
    def lent(self) -> bool:
        return self._user is not None and not self._user.expired()


class SharedSegments:
    """Segments of this rank, which the others read.

    Between two meetings each rank may write into the segment that it lent last,
    and read those of the others. So a segment is lent again two meetings later.

    Args:
        lane: all ranks, which have to call.
    """

    def __init__(self, lane: CollectiveLane) -> None:
        self._rank = lane.rank
        # One name for all: rank 0's.
        self._token = int(lane.rows(torch.tensor([secrets.randbits(62)]))[0])
        self._own: list[_Segment] = []
        self._known: set[tuple[int, int]] = set()
        """Segments that all ranks have opened, by rank and number."""
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self.works = lane.world_size > 1 and self._all_see_all(lane)

    def _all_see_all(self, lane: CollectiveLane) -> bool:
        """Whether each rank sees what every other one wrote: they are on one machine, and not shut off."""
        mine = self._make(_PAGE)
        if mine is not None:
            mine.memory[:8] = self._value_of(lane.rank)
        lane.rows(torch.tensor([0]))  # all have written
        seen = mine is not None and all(self._sees(rank) for rank in range(lane.world_size) if rank != lane.rank)
        everywhere = bool(lane.rows(torch.tensor([int(seen)])).all())
        self._forget_names(self._own)
        self._known.update((rank, 0) for rank in range(lane.world_size))
        return everywhere

    def _sees(self, rank: int) -> bool:
        try:
            self._theirs[rank, 0] = _opened(self._path(rank, 0))
        except (OSError, ValueError):
            return False
        return self._theirs[rank, 0][:8] == self._value_of(rank)

    def _value_of(self, rank: int) -> bytes:
        return (self._token ^ rank).to_bytes(8, "little")

    def _path(self, rank: int, index: int) -> Path:
        return _FOLDER / f"longshore-{self._token:x}-{rank}-{index}"

    def _make(self, num_bytes: int) -> _Segment | None:
        """None where there is no room (containers often have little of this memory)."""
        path = self._path(self._rank, len(self._own))
        try:
            segment = _Segment(path, -(-num_bytes // _PAGE) * _PAGE)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        self._own.append(segment)
        return segment

    def lend(self, num_bytes: int, meeting: int) -> tuple[int, Tensor] | None:
        """Memory for what is gathered at ``meeting``, counted from 0, and the number of its segment; None: no room."""
        free = [
            (segment.capacity, index)
            for index, segment in enumerate(self._own)
            if segment.capacity >= num_bytes and segment.last_meeting <= meeting - 2 and not segment.lent
        ]
        if not free and self._make(num_bytes) is None:
            return None
        index = min(free)[1] if free else len(self._own) - 1
        segment = self._own[index]
        segment.last_meeting = meeting
        return index, segment.lend(num_bytes)

    def read(self, rank: int, index: int, start: int, into: Tensor) -> None:
        """Bytes from ``start`` on of another rank's segment; ``into``: uint8, flat."""
        theirs = torch.frombuffer(self._theirs[rank, index], dtype=torch.uint8, offset=start, count=into.numel())
        into.copy_(theirs)

    def open(self, lane: CollectiveLane, segments: Sequence[int]) -> None:
        """Before these, by rank, are read; all ranks have to call, with the same ones."""
        new = [(rank, index) for rank, index in enumerate(segments) if (rank, index) not in self._known]
        if not new:
            return
        self._known.update(new)
        for rank, index in new:
            if rank != self._rank:
                self._theirs[rank, index] = _opened(self._path(rank, index))
        lane.rows(torch.tensor([0]))  # all have opened them, so that no file needs to stay
        self._forget_names([self._own[index] for rank, index in new if rank == self._rank])

    def _forget_names(self, segments: Sequence[_Segment]) -> None:
        for segment in segments:
            segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._forget_names(self._own)
        self._own, self._theirs = [], {}


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    # For nobody else on the machine: they are weights.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb+") as file:
        # Now: a file that turns out to have no room when it is written ends the process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def _opened(path: Path) -> mmap.mmap:
    with path.open("rb+") as file:
        return mmap.mmap(file.fileno(), 0)
