"""Exchange of tensors between ranks: over memory that they share, gloo, or the backend of their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.ranks.shared_memory import SharedBlock, SharedMemory
from longshore.ranks.waiting import all_gather_single


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
    """Collectives that move tensors. Their sizes follow from what the ranks said in the meetings before, so all ranks
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
