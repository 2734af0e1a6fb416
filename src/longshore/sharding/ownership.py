"""Who steps what: a part of every bucket (ZeRO-1 and 2), or everything (stage 0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.layout import Slab
from longshore.sharding.action import Action
from longshore.sharding.bucket import Bucket, Piece, plan_buckets
from longshore.sharding.lane import CollectiveLane
from longshore.sharding.reduction import parts, slices
from longshore.sharding.window_count import WindowCount

GATHER_NUMEL = 1 << 23
"""Elements of one gathering over all ranks; larger ones are no faster."""


class Ownership(ABC):
    """Which pieces this rank steps, and what the ranks tell each other for that."""

    def __init__(self, lane: CollectiveLane) -> None:
        self.lane = lane
        self.windows = WindowCount()
        self.averaging_lane = lane
        """To those ranks over which gradients are averaged. Used in jobs of the other."""

    replicates = True
    """Whether every rank has all of each parameter on its device."""

    def plan(
        self,
        parameters: Sequence[tuple[int, int, torch.dtype]],
        bucket_numel: int,
        first_bucket: int,
        first_piece: int,
    ) -> tuple[Bucket, ...]:
        """Buckets of new parameters, given as ``(index, numel, dtype)``; see :func:`plan_buckets`."""
        return plan_buckets(parameters, bucket_numel, self.lane.world_size, first_bucket, first_piece)

    def place(self, piece: Piece) -> slice:
        """Where an owned piece lies in what this rank has of its parameter on the device, flat."""
        return slice(piece.parameter_offset, piece.parameter_offset + piece.numel)

    def part(self, parameter: int, values: Tensor) -> Tensor:
        """Of a whole parameter, flat, what the pieces of this rank and of those it averages with are cut from."""
        return values

    def held(self, parameter: int, values: Tensor) -> Tensor:
        """Of a whole parameter, flat, what this rank has on the device."""
        return values

    def outside_of_the_model(self, action: Action, failed: bool = False) -> None:
        """No rank is in a forward or a backward, and all are at this action; all have to call. ``failed``: this one
        gave up its window."""
        return

    def check_used(self, parameters: Sequence[int], by_rank: Sequence[Sequence[bool]]) -> None:
        """Raises GradientError where ranks that have to use the same parameters did not; ``by_rank``: which ones."""
        return

    def close(self) -> None:
        """Leave the model as an ordinary one."""
        return

    def before_publishing(self) -> None:
        """Parameters on the device are about to change."""
        return

    def into_backward(self) -> None:
        """A backward begins whose gradients are reduced; all have to call. Raises what a meeting does."""
        return

    def interrupted(self) -> bool:
        """A forward or a backward raised, and nothing of it goes on. Whether the window is given up by that."""
        return False

    def give_up(self) -> None:
        """This rank will discard its window. Others may not know; they are told when they meet this rank."""
        self.windows.give_up()
        self.lane.give_up_window()

    @abstractmethod
    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        """The pieces that this rank steps."""

    @abstractmethod
    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        """How many elements of the parameter each rank steps."""

    @abstractmethod
    def arrivals(self, bucket: Bucket, reduced: list[tuple[Piece, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
        """What a round brought for the owned pieces, given what it brought for this rank's shard: float32, flat.
        In a job of the lane."""

    @abstractmethod
    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        """Complete the parameters ``targets`` (flat, by index) on every rank. In a job of the lane."""

    @abstractmethod
    def assemble(self, parameter: int, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        """One parameter's state from its pieces, given by rank; ``read`` gives an owned one."""

    def tells(self, parameter: int, rank: int) -> bool:
        """Whether what this rank has counts where all is put together; otherwise another one has the same."""
        return True

    def tells_of(self, bucket: Bucket, piece: Piece) -> bool:
        """Whether this rank is the one to tell of an owned piece, where several own the same."""
        return True

    def slab_of(self, parameter: int) -> Slab | None:
        """Where tensor parallelism cut the parameter; offsets of pieces are counted in what it left."""
        return None

    @abstractmethod
    def total(self, part: float) -> float:
        """The sum over all parameters, where ``part`` is the sum over those owned pieces that count."""


class Sharded(Ownership):
    """Each rank steps its shard of every bucket.

    Args:
        lane: the ranks.
        gather_numel: elements, over all ranks, of one gathering of parameters.
    """

    def __init__(self, lane: CollectiveLane, gather_numel: int) -> None:
        super().__init__(lane)
        self._gather_numel = min(gather_numel, GATHER_NUMEL)

    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        return bucket.pieces[self.averaging_lane.rank]

    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        return [sum(piece.numel for piece in own if piece.parameter == parameter) for own in bucket.pieces]

    def arrivals(self, bucket: Bucket, reduced: list[tuple[Piece, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
        yield from reduced

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        example = next(iter(targets.values()))
        for start, numel in slices(bucket.shard_numel, self.lane.world_size, self._gather_numel):
            num_bytes = numel * example.element_size()
            outgoing = self.lane.outgoing(num_bytes, example.device)
            chunk = outgoing.memory.view(example.dtype)
            by_rank = [
                [entry for entry in parts(pieces, start, numel) if entry.piece.parameter in targets]
                for pieces in bucket.pieces
            ]
            for entry in by_rank[self.lane.rank]:
                chunk[entry.in_slice] = targets[entry.piece.parameter][entry.in_parameter]
            received = self.lane.gather(outgoing)
            for rank, entries in enumerate(by_rank):
                if rank != self.lane.rank:
                    values = received[rank].view(example.dtype)
                    for entry in entries:
                        targets[entry.piece.parameter][entry.in_parameter].copy_(values[entry.in_slice])

    def assemble(self, parameter: int, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        longest = max(piece.numel for own in pieces for piece in own)
        received = self.from_all(parameter, [read(piece.index) for piece in pieces[self.lane.rank]], longest)
        # A parameter lies in one bucket, and each rank has at most one run of it.
        runs = [(piece, rank) for rank, own in enumerate(pieces) for piece in own]
        runs.sort(key=lambda run: run[0].parameter_offset)
        return torch.cat([received[rank][: piece.numel] for piece, rank in runs])

    def from_all(self, parameter: int, mine: Sequence[Tensor], longest: int) -> list[Tensor]:
        """What each rank has of one parameter, at most ``longest`` elements: float32, on the CPU, padded, by rank."""
        padded = torch.zeros(longest, dtype=torch.float32)
        for values in mine:
            padded[: values.numel()] = values

        def collect() -> list[Tensor]:
            self.lane.meet(Action.READ, parameter, 0)
            outgoing = self.lane.outgoing(4 * longest, self.lane.device)
            outgoing.memory.copy_(padded.view(torch.uint8))
            return [chunk.to("cpu", copy=True).view(torch.float32) for chunk in self.lane.gather(outgoing)]

        return self.lane.run(collect)

    def total(self, part: float) -> float:
        # Added in the order of the ranks, so that all of them have the same bits.
        parts = self.lane.run(lambda: self.lane.rows(torch.tensor([part], dtype=torch.float64)))
        return sum(parts.view(-1).tolist())


class Replicated(Ownership):
    """Each rank steps everything, on the same gradients."""

    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        return [piece for pieces in bucket.pieces for piece in pieces]

    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        return [sum(piece.numel for piece in self.owned(bucket) if piece.parameter == parameter)] * len(bucket.pieces)

    def arrivals(self, bucket: Bucket, reduced: list[tuple[Piece, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
        values = {piece.index: tensor for piece, tensor in reduced}
        own = bucket.pieces[self.lane.rank]
        flags = torch.zeros(max(map(len, bucket.pieces)), dtype=torch.uint8)
        flags[: len(own)] = torch.tensor([piece.index in values for piece in own], dtype=torch.uint8)
        used = self.lane.rows(flags).bool()
        outgoing = self.lane.outgoing(4 * bucket.shard_numel, self.lane.device)
        shard = outgoing.memory.view(torch.float32)
        for piece, tensor in reduced:
            shard[piece.shard_offset : piece.shard_offset + piece.numel] = tensor
        # The pieces stay until the step, and the lane's memory does not.
        shards = [chunk.view(torch.float32).clone() for chunk in self.lane.gather(outgoing)]
        for rank, pieces in enumerate(bucket.pieces):
            for position, piece in enumerate(pieces):
                if used[rank, position]:
                    yield piece, shards[rank][piece.shard_offset : piece.shard_offset + piece.numel]

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

    def assemble(self, parameter: int, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        return torch.cat([read(piece.index) for own in pieces for piece in own])

    def tells_of(self, bucket: Bucket, piece: Piece) -> bool:
        return piece in bucket.pieces[self.lane.rank]

    def total(self, part: float) -> float:
        return part
