"""Description of an engine's layout, memory and gradients, as data and as printed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from longshore.byte_sizes import format_byte_size
from longshore.engine.binding import Binding
from longshore.engine.config.model import Config
from longshore.engine.ranks import Ranks
from longshore.layout.formats import BLOCK_NUMEL, EIGHT_BIT_LEAST_NUMEL, StateFormat
from longshore.optim.dtensor import held_part
from longshore.optim.grad_placeholder import is_released
from longshore.optim.parameters import ParameterRecord
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.store.sharded import ShardedStore
from longshore.tiles import SpeculationRecord, Tiles

if TYPE_CHECKING:
    from longshore.streaming import Stream

_MOST_ROWS = 60


@dataclass(frozen=True)
class BucketRow:
    """One bucket: parameters whose gradients are reduced together."""

    index: int
    dtype: str
    numel: int
    shard_numel: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: where it is stepped, and the account of its gradients in the last window.

    ``owners`` are the ranks that step a shard of it, with the numbers of elements; ``arrived``, ``reduced`` and
    ``applied`` are those of :class:`longshore.tiles.Entry`.
    """

    name: str
    numel: int
    dtype: str
    bucket: int | None
    owners: tuple[tuple[int, int], ...]
    step: int
    arrived: int
    reduced: int | None
    applied: int


class FormatCount(NamedTuple):
    """Parameters whose states have one format, and all their elements, on whichever rank they are."""

    parameters: int
    numel: int


@dataclass(frozen=True)
class Explanation:
    """The result of ``engine.explain()``; ``host_bytes`` and ``device_bytes`` count this rank's memory by kind."""

    stage: int
    rank: int
    world_size: int
    offload: str
    ratio: float
    """The share of the optimizer's state that should be on the host; 1.0 with parameters in host memory."""
    offloaded_share: float
    """The share that is there, of this rank's elements: parameters are divided at few places."""
    buckets: tuple[BucketRow, ...]
    tiles: int
    tile_numel: int
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    parameters: tuple[ParameterRow, ...]
    states: str
    """The format of the optimizer's states that was asked for."""
    states_by_format: dict[str, FormatCount]
    """The formats that parameters have: with ``"8bit"``, small ones have ``"bf16"``."""
    speculation: SpeculationRecord | None
    """Tiles that were stepped ahead in the last window; None if stepping ahead is off."""
    sums: str
    """Where several gradients of one window are added."""
    cpus: str
    """The CPUs and threads of this rank, with the reason."""
    streaming: str | None = None
    """What was copied of parameters that rest on the host (:meth:`longshore.Stream.explain`); None: they do not."""

    def print(self, console: Console | None = None) -> None:
        """Print tables, with at most 60 parameters, and the number of the others."""
        if console is None:
            console = Console()
            if not console.is_terminal:  # a log has no width
                console = Console(width=max(console.width, 160))
        where = f"optimizer state on {'the host' if self.offload == 'cpu' else 'the device'}"
        if self.offload == "cpu" and self.ratio < 1.0:
            share = f"{self.offloaded_share:.0%} of optimizer state on the host (ratio {self.ratio:g})"
            where = f"{share}, the rest on the device"
        console.print(
            f"longshore: stage {self.stage}, rank {self.rank} of {self.world_size}, {where}, {self.tiles} tiles of up "
            f"to {self.tile_numel:,} elements"
        )
        console.print(self._states_line())
        console.print(f"several gradients of one step are added {self.sums}")
        console.print(f"CPUs: {self.cpus}")
        for memory, kinds in (("host", self.host_bytes), ("device", self.device_bytes)):
            parts = ", ".join(f"{kind} {format_byte_size(count)}" for kind, count in kinds.items())
            console.print(f"{memory}: {parts}")
        if self.streaming is not None:
            console.print(self.streaming)
        if (ahead := self.speculation) is not None:
            console.print(
                f"stepped ahead: {ahead.begun} tiles, {ahead.kept} kept, {ahead.redone} redone, "
                f"{ahead.dropped} dropped, {ahead.waited} without one of the {ahead.spares} spares; score "
                f"{ahead.score:.2f}, the next window is {'bet on' if ahead.bets else 'not bet on'}"
            )
        if self.buckets:
            table = Table("bucket", "dtype", "elements", "a rank's shard", "parameters")
            for row in self.buckets:
                names = " ... ".join(dict.fromkeys([*row.parameters[:1], *row.parameters[-1:]]))
                table.add_row(str(row.index), row.dtype, f"{row.numel:,}", f"{row.shard_numel:,}", names)
            console.print(table)
        table = Table("parameter", "elements", "bucket", "stepped by rank", "step", "arrived", "reduced", "applied")
        for entry in self.parameters[:_MOST_ROWS]:
            owners = ", ".join(f"{rank}: {numel:,}" for rank, numel in entry.owners)
            reduced = "elsewhere" if entry.reduced is None else str(entry.reduced)
            bucket = "" if entry.bucket is None else str(entry.bucket)
            counts = (str(entry.step), str(entry.arrived), reduced, str(entry.applied))
            table.add_row(entry.name, f"{entry.numel:,}", bucket, owners, *counts)
        console.print(table)
        if len(self.parameters) > _MOST_ROWS:
            console.print(f"and {len(self.parameters) - _MOST_ROWS} more parameters")

    def _states_line(self) -> str:
        """Return how the optimizer's states are encoded, with the rule if it is not the same for all parameters."""
        line = f"optimizer states: {self.states}"
        if self.states != StateFormat.EIGHT_BIT.value:
            return line
        encoded, others = (self.states_by_format.get(name, FormatCount(0, 0)) for name in ("8bit", "bf16"))
        line += f" for {encoded.parameters:,} parameters ({encoded.numel:,} elements)"
        if others.parameters:
            line += (
                f", bf16 for the other {others.parameters:,} ({others.numel:,} elements), which have one dimension, "
                f"fewer than {EIGHT_BIT_LEAST_NUMEL:,} elements, or rows that are no multiple of {BLOCK_NUMEL} elements"
            )
        return line


def explain(
    config: Config, ranks: Ranks, optimizer: TiledOptimizer, binding: Binding, stream: Stream | None = None
) -> Explanation:
    """Describe an engine, given its parts; no rank waits for another."""
    members = core_of(optimizer).members
    store, tiles, records = members.store, members.store.tiles, members.records
    layout = store.ownership.layout if isinstance(store, ShardedStore) else None
    names = {record.index: record.name for record in records}
    buckets = [
        BucketRow(
            bucket.index,
            str(bucket.dtype),
            bucket.numel,
            bucket.shard_numel,
            tuple(names[member.parameter] for member in bucket.members),
        )
        for bucket in (layout.buckets if layout else ())
    ]
    rows = []
    for record in records:
        bucket, owners = None, ((0, record.parameter.numel()),)
        if layout is not None:
            bucket, owners = layout.bucket_of.get(record.index), layout.owners(record.index)
        entry = members.window.entries.get(record.index)
        counts = (entry.arrived, entry.reduced, entry.applied) if entry else (0, 0, 0)
        number = None if bucket is None else bucket.index
        numel, dtype = record.parameter.numel(), str(record.dtype)
        rows.append(ParameterRow(record.name, numel, dtype, number, owners, record.step, *counts))
    gradients = [each for record in records if (each := record.parameter.grad) is not None and not is_released(each)]
    values = Counter(
        parameters=sum(record.held.numel() * record.held.element_size() for record in records),
        gradients=sum(held_part(each).untyped_storage().nbytes() for each in gradients),
    )
    device_bytes, host_bytes = Counter(tiles.device_bytes()), Counter(tiles.host_bytes())
    rests = ranks.device.type != "cpu" and any(record.held.device.type == "cpu" for record in records)
    (host_bytes if rests else device_bytes).update(values)
    if stream is not None:
        device_bytes["parameters"] = stream.counts.resident_bytes
    return Explanation(
        stage=config.stage,
        rank=ranks.rank,
        world_size=ranks.world_size,
        offload=config.offload_device,
        ratio=config.offload_ratio if len(tiles.tiers) > 1 else 1.0,
        offloaded_share=_offloaded_share(tiles),
        buckets=tuple(buckets),
        tiles=len(tiles),
        tile_numel=max((tile.layout.numel for tile in tiles), default=0),
        host_bytes=dict(host_bytes),
        device_bytes=dict(device_bytes),
        parameters=tuple(rows),
        states=members.offload.state_format.value,
        states_by_format=_states_by_format(records),
        speculation=optimizer.speculation,
        sums=tiles.tier.device_sums.text,
        cpus=f"{binding.text}; torch threads: {torch.get_num_threads()}",
        streaming=None if stream is None else stream.explain(),
    )


def _states_by_format(records: Iterable[ParameterRecord]) -> dict[str, FormatCount]:
    found: dict[str, FormatCount] = {}
    for record in records:
        parameters, numel = found.get(record.coding.format.value, FormatCount(0, 0))
        found[record.coding.format.value] = FormatCount(parameters + 1, numel + record.parameter.numel())
    return found


def _offloaded_share(tiles: Tiles) -> float:
    """Return the share of the elements that do not stay on the device for ``ratio``; 1.0 without elements."""
    left, whole = (sum(tile.layout.numel for tile in among) for among in (tiles.tier.tiles, tiles))
    return left / whole if whole > 0 else 1.0
