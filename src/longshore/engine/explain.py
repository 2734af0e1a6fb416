"""Description of an engine's layout, memory and gradients, as data and as printed tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from longshore.byte_sizes import format_byte_size
from longshore.host import SpeculationRecord
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.released import is_released
from longshore.optim.shards import held_part
from longshore.sharding import ShardedStore

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
    """One parameter: where it is stepped, and what happened to its gradients in the last window.

    ``owners`` are the ranks that step a shard of it, with the numbers of elements; ``arrived``, ``reduced`` and
    ``applied`` are those of :class:`longshore.optim.ledger.Entry`.
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


@dataclass(frozen=True)
class Explanation:
    """The result of ``engine.explain()``; ``host_bytes`` and ``device_bytes`` count this rank's memory by kind."""

    stage: int
    rank: int
    world_size: int
    offload: str
    ratio: float
    """The offloaded share of the optimizer's state; 1.0 with parameters in host memory."""
    buckets: tuple[BucketRow, ...]
    tiles: int
    tile_numel: int
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    parameters: tuple[ParameterRow, ...]
    speculation: SpeculationRecord | None = None
    """Tiles that were stepped ahead in the last window; None if stepping ahead is off."""
    cpus: str = ""
    """The CPUs and threads of this rank, with the reason."""

    def print(self, console: Console | None = None) -> None:
        """Print tables, with at most 60 parameters; the rest is counted."""
        if console is None:
            console = Console()
            if not console.is_terminal:  # a log has no width
                console = Console(width=max(console.width, 160))
        console.print(
            f"longshore: stage {self.stage}, rank {self.rank} of {self.world_size}, {self._where()}, {self.tiles} "
            f"tiles of up to {self.tile_numel:,} elements"
        )
        if self.cpus:
            console.print(f"CPUs: {self.cpus}")
        console.print(_bytes_line("host", self.host_bytes))
        console.print(_bytes_line("device", self.device_bytes))
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

    def _where(self) -> str:
        if self.offload == "cpu" and self.ratio < 1.0:
            return f"{self.ratio:.0%} of optimizer state on the host, the rest on the device"
        return f"optimizer state on {'the host' if self.offload == 'cpu' else 'the device'}"


def explain(engine: Any) -> Explanation:
    """Describe an engine; no rank waits for another."""
    optimizer: HostOptimizer = engine.optimizer
    store, records = optimizer._core.store, optimizer._core.records
    sharded = store if isinstance(store, ShardedStore) else None
    tiles = store.local.tiles
    names = {record.index: record.name for record in records}
    buckets = [
        BucketRow(
            bucket.index,
            str(records[bucket.members[0].parameter].dtype),
            sum(member.numel for member in bucket.members),
            bucket.shard_numel,
            tuple(names[member.parameter] for member in bucket.members),
        )
        for bucket in (sharded.ownership.buckets if sharded else ())
    ]
    rows = []
    for record in records:
        entry = optimizer._core.ledger.get(record.index)
        arrived, reduced, applied = (entry.arrived, entry.reduced, entry.applied) if entry else (0, 0, 0)
        bucket, owners = None, ((0, record.parameter.numel()),)
        if sharded is not None:
            owners = sharded.ownership.owners(record.index)
            holder = sharded.ownership.bucket_of.get(record.index)
            bucket = None if holder is None else holder.index
        rows.append(
            ParameterRow(
                record.name, record.parameter.numel(), str(record.dtype), bucket, owners, record.step, arrived, reduced,
                applied,
            )
        )  # fmt: skip
    parameter_bytes = sum(record.held.numel() * record.held.element_size() for record in records)
    held = [record.parameter.grad for record in records]
    gradient_bytes = sum(
        held_part(gradient).untyped_storage().nbytes()
        for gradient in held
        if gradient is not None and not is_released(gradient)
    )
    device_bytes = {"parameters": parameter_bytes, "gradients": gradient_bytes}
    for kind, count in store.local.device_bytes().items():
        device_bytes[kind] = device_bytes.get(kind, 0) + count
    return Explanation(
        stage=engine.config.stage,
        rank=engine.ranks.rank,
        world_size=engine.ranks.world_size,
        offload=engine.config.offload_device,
        ratio=engine.config.offload_ratio if len(store.local.backends) > 1 else 1.0,
        buckets=tuple(buckets),
        tiles=len(tiles),
        tile_numel=max((tile.layout.numel for tile in tiles), default=0),
        host_bytes=store.local.host_bytes(),
        device_bytes=device_bytes,
        parameters=tuple(rows),
        speculation=optimizer.speculation,
        cpus=f"{engine.binding.text}; torch threads: {torch.get_num_threads()}",
    )


def _bytes_line(where: str, kinds: dict[str, int]) -> str:
    parts = ", ".join(f"{kind} {format_byte_size(count)}" for kind, count in kinds.items())
    return f"{where}: {parts}"
