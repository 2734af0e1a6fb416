"""Memory that the ranks of one machine share, so that one of them reads what another one wrote."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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

    def lend(self, num_bytes: int, held: bool) -> Tensor:
        """uint8 ``[num_bytes]``; ``held``: its storage says when it is no longer used."""
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self._user = StorageWeakRef(tensor.untyped_storage()) if held else None
        return tensor

    @property
    def lent(self) -> bool:
        return self._user is not None and not self._user.expired()


class SharedSegments:
    """Segments of this rank, which the others read.

    Ranks write, meet, and read. Between two meetings each rank may write into the
    segment that it lent last, and read those of the others. So a segment is lent
    again two meetings later.

    Args:
        rank: this one.
        rows: gathers every rank's row of numbers; all ranks have to call, here and where it is called below.
    """

    def __init__(self, rank: int, rows: Callable[[Tensor], Tensor]) -> None:
        self._rank = rank
        self._rows = rows
        # One name for all: rank 0's.
        tokens = rows(torch.tensor([secrets.randbits(62)]))
        self._token = int(tokens[0])
        self._meetings = 0
        self._own: list[_Segment] = []
        self._known: set[tuple[int, int]] = set()
        """Segments that all ranks have opened, by rank and number."""
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self.works = len(tokens) > 1 and self._all_see_all(len(tokens))
        """Whether all ranks share memory; the same on all of them."""

    def _all_see_all(self, world_size: int) -> bool:
        """Whether each rank sees what every other one wrote: they are on one machine, and not shut off."""
        mine = self._make(_PAGE)
        if mine is not None:
            mine.memory[:8] = self._value_of(self._rank)
        self._all(True)  # have written
        seen = mine is not None and all(self._sees(rank) for rank in range(world_size))
        everywhere = self._all(seen)
        self._forget_names(self._own)
        self._known.update((rank, 0) for rank in range(world_size))
        return everywhere

    def _all(self, said: bool) -> bool:
        return bool(self._rows(torch.tensor([int(said)])).all())

    def _sees(self, rank: int) -> bool:
        return self._opens(rank, 0) and self._theirs[rank, 0][:8] == self._value_of(rank)

    def _opens(self, rank: int, index: int) -> bool:
        try:
            self._theirs[rank, index] = _opened(self._path(rank, index))
        except (OSError, ValueError):
            return False
        return True

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

    def lend(self, num_bytes: int, held: bool) -> tuple[int, Tensor] | None:
        """Memory for what the others read after the next meeting, and the number of its segment; None: no room.

        ``held``: not lent again as long as a tensor uses it; otherwise until the meeting after the next one.
        """
        if not self.works:
            return None
        free = [
            (segment.capacity, index)
            for index, segment in enumerate(self._own)
            if segment.capacity >= num_bytes and segment.last_meeting <= self._meetings - 2 and not segment.lent
        ]
        if not free and self._make(num_bytes) is None:
            return None
        index = min(free)[1] if free else len(self._own) - 1
        segment = self._own[index]
        segment.last_meeting = self._meetings
        return index, segment.lend(num_bytes, held)

    def met(self, segments: Sequence[int]) -> bool:
        """The ranks met and have these to read, by rank; -1 for none. Whether all have one, and are able to read."""
        self._meetings += 1
        if not self.works or min(segments) < 0:
            return False
        new = [(rank, index) for rank, index in enumerate(segments) if (rank, index) not in self._known]
        if new:
            self._known.update(new)
            opened = [self._opens(*each) for each in new]
            self.works = self._all(all(opened))
            # No file needs to stay.
            self._forget_names([self._own[index] for rank, index in new if rank == self._rank])
        return self.works

    def of(self, rank: int, index: int, start: int, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, from ``start`` on, of a rank's segment, until that one is lent again."""
        return torch.frombuffer(self._theirs[rank, index], dtype=torch.uint8, offset=start, count=num_bytes)

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
