"""Memory that the ranks of one machine share: what one of them writes, the others read, and nothing is sent."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import operator
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_FOLDER = Path("/dev/shm")
_ROUNDING = 1 << 16
_STALE_S = 24 * 3600.0
_MOST = 48
"""How many blocks there may be: a rank says in one number which of them are free."""
_NO_ROOM, _APART, _OTHER = -1, -2, -3
"""Sent in place of a block's number: there is no room for one; this rank stands apart; the ranks do not share it."""
NOTE_NUMEL = 4
"""How many numbers a rank says in a meeting."""

_LOGGER = logging.getLogger("longshore")


class SharedBlock:
    """A block of memory that every rank has mapped."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        # Whoever comes first makes it. Other users must not read it: these are weights.
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+") as file:
            # Allocated now: a file that turns out to have no room when it is written ends the process.
            os.posix_fallocate(file.fileno(), 0, capacity)
            self.memory = mmap.mmap(file.fileno(), capacity)
        self.free = False
        """Whether it can be lent, as all ranks know: the last meeting said so, and it was not lent since."""
        self.lent_for = 0
        """The last meeting for which it was lent."""
        self._user: StorageWeakRef | None = None
        # Also called where an exception ends this process; and not where one that it forked ends.
        self.remove_file = weakref.finalize(self, _unlink, path, os.getpid())

    def lend(self, num_bytes: int, held: bool, meeting: int) -> Tensor:
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self.free = False
        self.lent_for = meeting
        self._user = StorageWeakRef(tensor.untyped_storage()) if held else None
        return tensor

    def done_with(self, meeting: int) -> bool:
        """Whether this rank neither writes nor reads it any more, as it comes to this meeting."""
        return self.lent_for < meeting and (self._user is None or self._user.expired())


class SharedMemory:
    """Blocks of which every rank writes its own part, and all read all of them.

    The ranks write, meet, and read. At each meeting they also say which blocks they are done with. So all ranks know
    the same about every block, and lend the same one next without further messages. A rank that failed may know
    something else: it stands apart until all ranks have met and begin anew.

    Args:
        rank: this one.
        rows: gathers every rank's row of numbers; all ranks have to call.
    """

    def __init__(self, rank: int, rows: Callable[[Tensor], Tensor]) -> None:
        # One name for all: rank 0's.
        tokens = rows(torch.tensor([secrets.randbits(62)])).view(-1).tolist()
        self._token: int = tokens[0]
        _remove_stale()
        self._generation = 0
        self._meetings = 0
        """How many meetings this rank came to."""
        self._blocks: list[SharedBlock] = []
        self._no_room = False
        self._apart = False
        self._lent_for = 0
        """The last meeting for which a block was lent."""
        self.works = False
        self.works = len(tokens) > 1 and self._all_see_all(rank, len(tokens), rows)
        """Whether all ranks share memory; the same on all of them."""

    def _all_see_all(self, rank: int, world_size: int, rows: Callable[[Tensor], Tensor]) -> bool:
        """Whether each rank sees what every other one wrote: they are on one machine, and in one container."""
        mine = self._make(8 * world_size)
        values = [(self._token ^ each).to_bytes(8, "little") for each in range(world_size)]
        if mine is not None:
            mine.memory[8 * rank : 8 * rank + 8] = values[rank]
        rows(torch.tensor([0]))  # all have written
        seen = mine is not None and mine.memory[: 8 * world_size] == b"".join(values)
        everywhere = bool(rows(torch.tensor([int(seen)])).all())
        self._begin_anew(1)
        return everywhere

    def _make(self, num_bytes: int) -> SharedBlock | None:
        """None where there is no room (containers often have little of this memory)."""
        if len(self._blocks) == _MOST:
            self._no_room = True
            _LOGGER.warning("%d blocks of shared memory are in use; sockets take over, which is slower", _MOST)
            return None
        path = _FOLDER / f"longshore-{self._token:x}-{self._generation}-{len(self._blocks)}"
        try:
            block = SharedBlock(path, -(-num_bytes // _ROUNDING) * _ROUNDING)
        except OSError as error:
            path.unlink(missing_ok=True)
            self._no_room = True
            if self.works:
                _LOGGER.warning(
                    "no room in %s for %d MiB that ranks on this machine would share (%s): they send it through "
                    "sockets from now on, which is slower; give the container more (docker run --shm-size)",
                    _FOLDER,
                    -(-num_bytes >> 20),
                    error.strerror,
                )
            return None
        self._blocks.append(block)
        return block

    def lend(self, num_bytes: int, held: bool) -> tuple[SharedBlock, Tensor] | None:
        """uint8 ``[num_bytes]`` of which this rank may write its part, and the block that it is in; None: no room.

        After the next meeting it has what all ranks wrote. ``held``: as long as a tensor uses it; otherwise until this
        rank comes to the meeting after that.
        """
        meeting = self._meetings + 1
        if self._lent_for == meeting:
            self.stand_apart()  # what was lent before has met nobody
        if not self.works or self._apart:
            return None
        self._lent_for = meeting
        free = [each for each in self._blocks if each.free and each.capacity >= num_bytes]
        block = min(free, key=lambda each: each.capacity) if free else self._make(num_bytes)
        return None if block is None else (block, block.lend(num_bytes, held, meeting))

    def stand_apart(self) -> None:
        """Note that this rank failed, and what it does next may not be what the others do: it writes nothing that they
        read until all know."""
        self._apart = True

    def come(self, block: SharedBlock | None) -> list[int]:
        """Come to a meeting with this block written (None: none); returns what this rank has to say there."""
        self._meetings += 1
        done = sum(1 << place for place, each in enumerate(self._blocks) if each.done_with(self._meetings))
        if block in self._blocks and not self._apart:
            return [self._generation, self._blocks.index(block), block.capacity, done]
        return [self._generation, _NO_ROOM if self._no_room else _APART if self._apart else _OTHER, 0, done]

    def met(self, said: Sequence[Sequence[int]]) -> bool:
        """Take what each rank said; returns whether all came with the same block, and what they wrote may be read."""
        if not self.works:
            return False
        indices = {index for _, index, _, _ in said}
        self.works = _NO_ROOM not in indices
        if not self.works or _APART in indices or any(each[:3] != said[0][:3] for each in said):
            self._begin_anew(1 + max(generation for generation, _, _, _ in said))
            return False
        done = functools.reduce(operator.and_, (each[3] for each in said))
        for place, each in enumerate(self._blocks):
            # Never what is true of this rank alone: the others would not know.
            each.free = bool(done >> place & 1) and each.lent_for <= self._meetings
        index = said[0][1]
        if index == _OTHER:
            return False  # lent before the ranks began anew
        self._blocks[index].remove_file()  # all ranks have it, and no file needs to stay
        return True

    def _begin_anew(self, generation: int) -> None:
        self.close()
        self._generation = generation
        self._apart = False

    def close(self) -> None:
        """Remove the files. What was lent stays as long as tensors use it."""
        for block in self._blocks:
            block.remove_file()
        self._blocks = []


def _remove_stale() -> None:
    """Remove files of ranks that were killed before all had opened them; nobody waits for so long."""
    for path in _FOLDER.glob("longshore-*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _STALE_S:
                path.unlink()


def _unlink(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
