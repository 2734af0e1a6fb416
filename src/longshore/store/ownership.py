"""Communication for parameters that ranks step in parts: a shard of each bucket (ZeRO-1 and 2), or all (stage 0)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.kernels import HostRule, Scale
from longshore.layout.formats import StateFormat
from longshore.layout.layout import Bucket, Layout
from longshore.layout.tiles import Range, Spec
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.meeting import Action
from longshore.store.agreement import as_flags, as_words
from longshore.store.store import Ownership, Residence
from longshore.tiles import Forecast

GATHER_NUMEL = 1 << 23
"""Elements of one gather over all ranks, on the CPU, where larger ones are no faster."""
DEVICE_GATHER_NUMEL = 1 << 26
"""Elements of one gather on accelerators, where each costs launches."""


class SliceEntry(NamedTuple):
    """Part of a range in a slice: its positions in the slice, in the range and in the parameter."""

    owned: Range
    in_slice: slice
    in_range: slice
    in_parameter: slice


def slices(shard_numel: int, world_size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, numel)`` of consecutive slices of a shard, of at most ``most`` elements over all ranks."""
    step = max(1, most // world_size)
    for start in range(0, shard_numel, step):
        yield start, min(step, shard_numel - start)


def slice_entries(ranges: Sequence[Range], start: int, numel: int) -> list[SliceEntry]:
    """Return the parts of the ranges of a shard that are in its elements ``[start, start + numel)``."""
    found = []
    for owned in ranges:
        first, last = max(owned.shard_offset, start), min(owned.shard_offset + owned.numel, start + numel)
        if first < last:
            inside = slice(first - owned.shard_offset, last - owned.shard_offset)
            whole = slice(owned.offset + inside.start, owned.offset + inside.stop)
            found.append(SliceEntry(owned, slice(first - start, last - start), inside, whole))
    return found


class SharedOwnership(Ownership):
    """The layout of one optimizer over ranks, and the communication that it needs. In this class each rank steps its
    shard of every bucket.

    Args:
        collectives: collectives over all ranks of the engine.
        layout: without parameters, which are added to it.
        gather_numel: elements, over all ranks, of one gather of parameters.

    Attributes:
        replicates: whether every rank has all of each parameter on its device.
        averaging_collectives: collectives over the ranks whose gradients are averaged; used in jobs of ``collectives``.
        layout: of all parameters; replaced where some are added.
        closed: whether this rank meets the others no more.
    """

    alone = False
    replicates = True

    def __init__(self, collectives: CollectiveThread, layout: Layout, gather_numel: int = GATHER_NUMEL) -> None:
        self.collectives = collectives
        self.averaging_collectives = collectives
        self.layout = layout
        self.closed = False
        on_cpu = collectives.data.device.type == "cpu"
        self._gather_numel = min(gather_numel, GATHER_NUMEL if on_cpu else DEVICE_GATHER_NUMEL)

    def __contains__(self, parameter: int) -> bool:
        return parameter in self.layout.specs

    def add(self, specs: Iterable[Spec]) -> Sequence[Spec]:
        added, former = list(specs), self.layout
        self._check_undivided(added)
        self.layout = former.extended(added)
        return self.layout.parts(len(former.buckets))

    def _check_undivided(self, specs: Iterable[Spec]) -> None:
        """Raise ValueError if tensor parallelism divides parameters that have to be known as a whole."""
        if self.averaging_collectives is self.collectives:
            return
        for spec in specs:
            if spec.matrix is not None:
                raise ValueError(
                    "Muon needs whole matrices, and tensor parallelism has divided them: train without it, or with "
                    "AdamW"
                )
            if spec.coding.format is not StateFormat.FP32:
                raise ValueError(
                    f"states={spec.coding.format.value!r} needs the places of elements in whole parameters, which "
                    "tensor parallelism has divided: train without it, or leave states out"
                )

    def owned(self, parameter: int) -> Sequence[Range]:
        return self.layout.owned(parameter)

    def part(self, parameter: int, values: Tensor) -> Tensor:
        return self.layout.division.part(parameter, values)

    def held(self, parameter: int, values: Tensor) -> Tensor:
        return self.layout.division.held(parameter, values)

    def check_open(self) -> None:
        if self.closed:
            raise LongshoreError(
                "engine.destroy() was called (or close() of its optimizer), so this rank meets the others no more: "
                "read and write optimizer state before it; call initialize() again to train on"
            )

    def drain(self) -> None:
        self.collectives.drain()

    def close(self) -> None:
        """End the threads of this object; :attr:`collectives` goes on."""

    def spread(self, bucket: Bucket, reduced: list[tuple[Range, Tensor]]) -> Iterable[tuple[Range, Tensor]]:
        """Return the gradients of the owned ranges from those of this rank's shard: float32, flat. Called in a job."""
        return reduced

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        """Complete the parameters ``targets`` (flat, by index) on every rank. Called in a job."""
        example = next(iter(targets.values()))
        for start, numel in slices(bucket.shard_numel, self.collectives.world_size, self._gather_numel):
            outgoing = self.collectives.data.outgoing(numel * example.element_size())
            own = outgoing.memory.view(example.dtype)
            by_rank = [
                [entry for entry in slice_entries(ranges, start, numel) if entry.owned.parameter in targets]
                for ranges in bucket.ranges
            ]
            for entry in by_rank[self.collectives.rank]:
                own[entry.in_slice] = targets[entry.owned.parameter][entry.in_parameter]
            received = self.collectives.data.gather(outgoing)
            for rank, entries in enumerate(by_rank):
                if rank != self.collectives.rank:
                    values = received[rank].view(example.dtype)
                    for entry in entries:
                        targets[entry.owned.parameter][entry.in_parameter].copy_(values[entry.in_slice])

    def assemble(self, parameter: int, which: str, read: Callable[[Range], Tensor]) -> Tensor:
        if parameter not in self.layout.bucket_of:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return self._from_ranks(parameter, which, [read(owned) for owned in self.layout.owned(parameter)])

    def _from_ranks(self, parameter: int, which: str, parts: Sequence[Tensor]) -> Tensor:
        """Return a whole parameter, or its state ``which``, from the parts of all ranks; ``parts`` are this rank's."""
        counts = self.layout.stepped_by_rank(parameter)
        padded = torch.zeros(max(counts), dtype=torch.float32)
        for part in parts:
            padded[: part.numel()] = part

        def collect() -> list[Tensor]:
            self.collectives.meet(
                Action.READ, zlib.crc32(f"{parameter} {which}".encode()), self.collectives.epoch.number
            )
            outgoing = self.collectives.data.outgoing(padded.nbytes)
            outgoing.memory.copy_(padded.view(torch.uint8))
            return [each.to("cpu", copy=True).view(torch.float32) for each in self.collectives.data.gather(outgoing)]

        received = self.collectives.run(collect)
        parts = [each[:count] for each, count in zip(received, counts, strict=True)]
        return self.layout.division.joined(parameter, parts)

    def total(self, part: float) -> float:
        """Return the sum over all parameters; ``part`` is the sum over this rank's owned ranges that count."""
        # The parts are added in the order of the ranks, so that all of them have the same bits.
        parts = self.collectives.run(
            lambda: self.collectives.rows(torch.tensor([part], dtype=torch.float64), Action.MEASURE)
        )
        return sum(parts.view(-1).tolist())


class ReplicatedOwnership(SharedOwnership):
    """SharedOwnership at stage 0: each rank steps everything, with the same gradients."""

    def spread(self, bucket: Bucket, reduced: list[tuple[Range, Tensor]]) -> Iterable[tuple[Range, Tensor]]:
        values = {owned.key: tensor for owned, tensor in reduced}
        own = bucket.ranges[self.collectives.rank]
        most = max(map(len, bucket.ranges))
        has = [owned.key in values for owned in own]
        outgoing = self.collectives.data.outgoing(4 * bucket.shard_numel)
        shard = outgoing.memory.view(torch.float32)
        for owned, tensor in reduced:
            shard[owned.shard_offset : owned.shard_offset + owned.numel] = tensor
        said = self.collectives.data.tell(outgoing, as_words([*has, *[False] * (most - len(has))]))
        used = [as_flags(row, most) for row in said.tolist()]
        # The gradients have to stay until the step, and the next collectives overwrite this memory.
        shards = [received.view(torch.float32).clone() for received in self.collectives.data.gather(outgoing)]
        for rank, ranges in enumerate(bucket.ranges):
            for position, owned in enumerate(ranges):
                if used[rank][position]:
                    yield owned, shards[rank][owned.shard_offset : owned.shard_offset + owned.numel]

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

    def assemble(self, parameter: int, which: str, read: Callable[[Range], Tensor]) -> Tensor:
        return torch.cat(
            [torch.empty(0, dtype=torch.float32), *(read(owned) for owned in self.layout.owned(parameter))]
        )

    def total(self, part: float) -> float:
        return part


class SharedResidence(Residence):
    """Residence of parameters that several ranks use together, each at its own pace: here each has all of them."""

    def check_outside_of_gather(self, action: Action) -> None:
        """Raise LongshoreError if parameters are whole now, inside a block of ``gather()``."""

    def outside_of_the_model(self, action: Action, failed: bool = False) -> None:
        """Wait until no rank is in a forward or backward and all are at this action. ``failed``: this rank gave up."""

    def into_backward(self) -> None:
        """Begin a backward whose gradients are reduced; all ranks have to call this. Raises the errors of a meeting."""

    def check_used(self, parameters: Sequence[int], by_rank: Sequence[Sequence[bool]]) -> None:
        """Raise GradientError if ranks that have to use the same parameters did not; ``by_rank``: those of each."""

    def give_up(self) -> bool:
        """Note that this rank gives up its window. Return whether the others were told, as far as they have to be."""
        return False

    def discarded(self) -> None:
        """Note that this rank discarded its window."""

    def close(self) -> None:
        """Undo all changes to the model."""


class OwnedForecast(Forecast):
    """Forecast for the ranges that this rank owns, from one for whole parameters."""

    def __init__(self, whole: Forecast, ownership: SharedOwnership) -> None:
        self._whole = whole
        self._ownership = ownership

    def scale(self) -> Scale:
        return self._whole.scale()

    def rules(self) -> Mapping[int, HostRule]:
        return {
            owned.key: rule
            for parameter, rule in self._whole.rules().items()
            for owned in self._ownership.layout.owned(parameter)
        }
