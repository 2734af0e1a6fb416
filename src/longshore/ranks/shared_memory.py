"""Memory shared by the ranks of one machine: each reads the others' writes, and nothing is sent."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import mmap
import operator
import os
import secrets
import stat
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
"""Maximal number of blocks: a rank sends, as the bits of one number, which of them it is done with."""
_NO_ROOM, _APART, _OTHER = -1, -2, -3
"""Values sent in place of a block's number: there is no room; this rank stands apart; no shared block is brought."""

_LOGGER = logging.getLogger("longshore")


class SharedBlock:
    """A block of memory that every rank has mapped."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        with os.fdopen(_open_own(path), "rb+") as file:
            try:
                # The memory is allocated now: if there were no room when it is written, the process would end.
                os.posix_fallocate(file.fileno(), 0, capacity)
                self.memory = mmap.mmap(file.fileno(), capacity)
            except OSError:
                _unlink(path, os.getpid())
                raise
        self.free = False
        """Whether it can be lent: all ranks agreed to that in the last meeting, and it was not lent since."""
        self.lent_for = 0
        """The last meeting for which it was lent."""
        self._user: StorageWeakRef | None = None
        # This is also called when an exception ends this process, but not when a process that it forked ends.
        self.remove_file = weakref.finalize(self, _unlink, path, os.getpid())

    def lend(self, num_bytes: int, held: bool, meeting: int) -> Tensor:
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self.free = False
        self.lent_for = meeting
        self._user = StorageWeakRef(tensor.untyped_storage()) if held else None
        return tensor

    def done_with(self, meeting: int) -> bool:
        """Return whether this rank, as it comes to this meeting, no longer writes or reads the block."""
        return self.lent_for < meeting and (self._user is None or self._user.expired())


class SharedMemory:
    """Shared blocks of memory: every rank writes its own part of a block, and all ranks read all parts.

    The ranks write, meet, and read. At each meeting they also say which blocks they are done with. So all ranks know
    the same about every block, and use the same one next without further messages. A rank that failed may know
    something else: it stands apart (it uses no block) until all ranks have met and begin anew.

    Args:
        rank: the number of this rank.
        rows: gathers every rank's row of numbers; all ranks have to call it.
    """

    def __init__(self, rank: int, rows: Callable[[Tensor], Tensor]) -> None:
        # All ranks use rank 0's number for the names of files, which nobody else can guess.
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
        """Return whether each rank sees the writes of every other one: all are on one machine, and in one container."""
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
        """Make a block; return None if there is no room (containers often have little of this memory)."""
        if len(self._blocks) == _MOST:
            self._no_room = True
            _LOGGER.warning("%d blocks of shared memory are in use; sockets take over, which is slower", _MOST)
            return None
        name = hashlib.sha256(f"{self._token}-{self._generation}-{len(self._blocks)}".encode()).hexdigest()
        path = _FOLDER / f"longshore-{name[:32]}"
        try:
            block = SharedBlock(path, -(-num_bytes // _ROUNDING) * _ROUNDING)
        except OSError as error:
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
        """Return a block and uint8 ``[num_bytes]`` in it, of which this rank may write its part; None if none is free.

        After the next meeting the memory has all ranks' writes. It stays lent until this rank comes to the meeting
        after that or, with ``held``, as long as a tensor uses it.
        """
        meeting = self._meetings + 1
        if self._lent_for == meeting:
            self.stand_apart()  # the block that was lent before was brought to no meeting
        if not self.works or self._apart:
            return None
        self._lent_for = meeting
        free = [each for each in self._blocks if each.free and each.capacity >= num_bytes]
        block = min(free, key=lambda each: each.capacity) if free else self._make(num_bytes)
        return None if block is None else (block, block.lend(num_bytes, held, meeting))

    def stand_apart(self) -> None:
        """Note that this rank failed, and may do something else than the others next. Until all ranks know, it writes
        nothing that they read."""
        self._apart = True

    def come(self, block: SharedBlock | None) -> list[int]:
        """Come to a meeting with this block written (or None); return the numbers that this rank has to send."""
        self._meetings += 1
        done = sum(1 << place for place, each in enumerate(self._blocks) if each.done_with(self._meetings))
        if block in self._blocks and not self._apart:
            return [self._generation, self._blocks.index(block), block.capacity, done]
        return [self._generation, _NO_ROOM if self._no_room else _APART if self._apart else _OTHER, 0, done]

    def met(self, said: Sequence[Sequence[int]]) -> bool:
        """Take the numbers that each rank sent; return whether all came with the same block, which may then be read."""
        if not self.works:
            return False
        said = [each[:4] for each in said]  # a message may have room for more
        indices = {index for _, index, _, _ in said}
        self.works = _NO_ROOM not in indices
        if not self.works or _APART in indices or any(each[:3] != said[0][:3] for each in said):
            self._begin_anew(1 + max(generation for generation, _, _, _ in said))
            return False
        done = functools.reduce(operator.and_, (each[3] for each in said))
        for place, each in enumerate(self._blocks):
            # This must not depend on anything that only this rank knows.
            each.free = bool(done >> place & 1) and each.lent_for <= self._meetings
        index = said[0][1]
        if index == _OTHER:
            return False  # the block was lent before the ranks began anew
        self._blocks[index].remove_file()  # all ranks have it, and no file needs to stay
        return True

    def _begin_anew(self, generation: int) -> None:
        self.close()
        self._generation = generation
        self._apart = False

    def close(self) -> None:
        """Remove the files. Memory that was lent stays as long as tensors use it."""
        for block in self._blocks:
            block.remove_file()
        self._blocks = []


def _remove_stale() -> None:
    """Remove files older than ``_STALE_S``: they are of ranks that were killed before all had opened them."""
    for path in _FOLDER.glob("longshore-*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _STALE_S:
                path.unlink()


def _open_own(path: Path) -> int:
    """Open a file that a rank made, or make it; no other user can read or write it, since it has weights in it.

    Raises:
        OSError: something else has that name, or another user made it.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "somebody else made the file", str(path))
    return descriptor


def _unlink(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # it is there no more, or is not ours to remove
            path.unlink()
