"""Exchange of tensors between ranks: over memory that they share, gloo, or the backend of their device."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longshore.ranks.waiting import all_gather_single

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
            self.withdraw()  # the block that was lent before was brought to no meeting
        if not self.works or self._apart:
            return None
        self._lent_for = meeting
        free = [each for each in self._blocks if each.free and each.capacity >= num_bytes]
        block = min(free, key=lambda each: each.capacity) if free else self._make(num_bytes)
        return None if block is None else (block, block.lend(num_bytes, held, meeting))

    def withdraw(self) -> None:
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


@dataclass(eq=False)
class Outgoing:
    """Memory to send: ``memory`` is flat uint8, and may be this rank's row of ``everyone``, which is in a shared
    ``block``.

    Attributes:
        shared: whether all ranks can read ``everyone``; None: they have not met since it was written.
    """

    memory: Tensor
    block: SharedBlock | None = None
    everyone: Tensor | None = None
    shared: bool | None = None


class DataPlane:
    """Collectives that move tensors. Their sizes follow from the meetings before, so all ranks
    call the same ones, in jobs of a :class:`CollectiveThread`.

    On an accelerator they run on the current stream, and do not wait for it.

    Args:
        group: process group of the ranks, used by one thread alone.
        device: device of all tensors.
        rows: see :meth:`CollectiveThread.rows`.
        communicating: context in which errors of torch.distributed become a :class:`RankError`.
        wait_for: waits for a collective on the CPU; raises RankError.
        began: called with each collective of an accelerator: the group, the handle and the device; returns the handle
            to wait by.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        rows: Callable[[Tensor], Tensor],
        communicating: Callable[[], AbstractContextManager[None]],
        wait_for: Callable[[Any], None],
        began: Callable[[Any, Any, torch.device], Any],
    ) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.device = device
        self._group = group
        self._rows = rows
        self._communicating = communicating
        self._peers = dist.get_process_group_ranks(group)
        self._wait_for = wait_for
        self._began = began
        # This is made by the first exchange in host memory.
        self._shared: SharedMemory | None = None
        # These grow to what jobs ask for, and stay allocated: new memory would cause a page fault for every page.
        self._buffers: dict[str, Tensor] = {}

    def outgoing(self, num_bytes: int) -> Outgoing:
        """Return memory for the data that :meth:`exchange` or :meth:`gather` sends next."""
        if self.device.type == "cpu":
            self._shared = self._shared or SharedMemory(self.rank, self._rows)
            if found := self._shared.lend(self.world_size * num_bytes, held=False):
                block, memory = found
                everyone = memory.view(self.world_size, num_bytes)
                return Outgoing(everyone[self.rank], block, everyone)
        return Outgoing(self._buffer("send", num_bytes))

    def _wait(self, work: Any) -> None:
        if self.device.type == "cpu":
            self._wait_for(work)
        else:
            self._began(self._group, work, self.device).wait()  # the current stream waits, not the host

    def _buffer(self, name: str, num_bytes: int) -> Tensor:
        """Return uint8 ``[num_bytes]`` for a job. It is the same memory each time: the next job overwrites it."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes:
            found = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return found[:num_bytes]

    def tell(self, outgoing: Outgoing, numbers: Sequence[int]) -> Tensor:
        """Say that ``outgoing`` is written and will be sent next, and tell all ranks these numbers, as many as each of
        them tells: one meeting for both. Returns every rank's numbers: int64 ``[world_size, len(numbers)]``."""
        shared = self._shared
        if shared is None or not shared.works:
            outgoing.shared = False
            own = torch.tensor(numbers, dtype=torch.int64)
            return self._rows(own) if numbers else own.expand(self.world_size, 0)
        said = self._rows(torch.tensor([*numbers, *shared.come(outgoing.block)]))
        outgoing.shared = shared.met(said[:, len(numbers) :].tolist())
        return said[:, : len(numbers)]

    def exchange(self, outgoing: Outgoing) -> list[Tensor]:
        """Send the ``k``-th of ``world_size`` equal parts to rank ``k``.

        Returns:
            uint8 ``[part_bytes]`` by rank: the part that each rank sent to this one, valid until the next is sent.
        """
        if (found := self._read(outgoing)) is not None:
            return [sent.view(self.world_size, -1)[self.rank] for sent in found]
        parts = outgoing.memory.view(self.world_size, -1)
        received = self._buffer("received", parts.numel()).view(parts.shape)
        with self._communicating():
            self._wait(dist.all_to_all_single(received.view(-1), parts.view(-1), group=self._group, async_op=True))
        return list(received)

    def gather(self, outgoing: Outgoing) -> list[Tensor]:
        """Send to all ranks; return all ranks' tensors, by rank: uint8, all of one size, valid until the next send."""
        if (found := self._read(outgoing)) is not None:
            return list(found)
        own = outgoing.memory
        received = self._buffer("received", self.world_size * own.numel()).view(self.world_size, -1)
        if self.device.type == "cpu":
            received[self.rank].copy_(own)
            self.complete(received)
            return list(received)
        with self._communicating():
            self._wait(all_gather_single(received.view(-1), own, self._group))
        return list(received)

    def _read(self, outgoing: Outgoing) -> Tensor | None:
        """Return the values of rank ``k`` as row ``k``, once all have; None if the ranks share no memory now."""
        if outgoing.shared is None:
            self.tell(outgoing, ())
        return outgoing.everyone if outgoing.shared else None

    def complete(self, rows: Tensor) -> None:
        """Receive row ``k`` of ``rows``, on the CPU, from rank ``k``; this rank's own row is already there."""
        # gloo's own all-gather takes several times as long. Nobody can look whether what it sends and receives directly
        # has ended: its timed wait closes the connection.
        with self._communicating():
            under_way = [
                dist.broadcast(row, peer, group=self._group, async_op=True)
                for row, peer in zip(rows, self._peers, strict=True)
            ]
            for each in under_way:
                self._wait_for(each)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._group = None  # a reference would keep sockets open
