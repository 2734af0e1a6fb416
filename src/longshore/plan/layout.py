"""The layout and the bytes of one rank, computed by the engine's own layout functions without allocating anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshore.layout import TileCount, count_tiles, default_tile_numel
from longshore.plan.job import Job, PlanChoice, PlannedModel, by_unit, parameter_bytes
from longshore.sharding.layout import chunk, fill_buckets, shard_numel_of, shard_parts
from longshore.sharding.reduction import DEVICE_SLICE_NUMEL, ReductionSettings
from longshore.tiles.arrivals import LANDING_SLOTS
from longshore.tiles.backend import kept_on_device
from longshore.tiles.events import PIPELINE_DEPTH
from longshore.tiles.memory import padded_bytes
from longshore.tiles.speculation import speculation_budget

_FLOAT_BYTES = 4
_IN_FLIGHT_BYTES = 1 << 28
"""Maximum bytes of gradients that wait for their copies to the host."""
_MOST_RANGES = 50_000
"""At stage 0 every rank steps the ranges of all shards; beyond this number, padding between them is not counted."""


class PlannedRange(NamedTuple):
    """A range of one parameter that this rank steps."""

    parameter: int  # index among the trainable parameters
    numel: int
    dtype: torch.dtype
    bucket: int | None  # index of the bucket that reduces its gradient; None: nothing is reduced


class PlannedBucket(NamedTuple):
    """Gradients that are reduced together."""

    parameters: tuple[int, ...]
    numel: int
    shard_numel: int
    dtype: torch.dtype


class TileGroup(NamedTuple):
    """Consecutive tiles of one size and dtype."""

    run: TileCount  # its parameters are indices into RankLayout.owned
    dtype: torch.dtype
    gradient_dtype: torch.dtype


@dataclass(frozen=True)
class RankLayout:
    """The layout of one rank; the first five fields are what it was made from."""

    model: PlannedModel  # with parameters in the job's dtype
    job: Job
    choice: PlanChoice
    ranks: int
    staged: bool  # gradients are copied from a device with its own memory into the host's tiles
    owned: tuple[PlannedRange, ...]  # what the rank steps, in the order of its tiles
    buckets: tuple[PlannedBucket, ...]  # in the order in which backward launches them; none on one rank
    host: tuple[TileGroup, ...]  # tiles of the store on the host, or of the only store
    device: tuple[TileGroup, ...]  # tiles whose state stays on the device
    numels: tuple[int, ...]  # elements of each trainable parameter in this rank's model

    @property
    def speculation(self) -> int | str:
        """Memory for stepping ahead: nothing is stepped ahead if the optimizer's state is on the device."""
        return self.choice.speculation if self.choice.offload == "cpu" else 0

    def own_master(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype are their own masters: see :class:`~longshore.tiles.TileStore`."""
        return dtype == torch.float32 and not self.publishes and not self.speculation

    @property
    def publishes(self) -> bool:
        """Whether new values of parameters are copied to a device."""
        return self.staged and not self.choice.streams

    @property
    def reduces_each_backward(self) -> bool:
        """Whether several ranks reduce in every backward of a step, and not only in the last one."""
        settings = ReductionSettings(self.choice.stage, self.job.bucket_numel)
        return self.ranks > 1 and settings.each_backward


def lay_out(
    model: PlannedModel, job: Job, choice: PlanChoice, ranks: int, staged: bool, rank: int = 0, threads: int = 1
) -> RankLayout:
    """Return the layout of one of ``ranks`` ranks, with ``threads`` on the host; rank 0 stores the most, except for
    padding.

    ``model`` has its own dtypes, and is cast to the job's here. ``staged``: whether parameters are on a device with its
    own memory.
    """
    model = model.cast(job.dtype)
    # On one rank, gradients of a streamed model come to ``.grad`` on the host before the store sees them.
    staged = staged and not (choice.streams and ranks == 1)
    numels = [each.numel for each in model.trainable]
    if choice.stage == 3 and ranks > 1:
        rows = [chunk(each.shape[0], ranks, rank) for each in model.trainable]
        numels = [
            (end - first) * (each.numel // max(1, each.shape[0]))
            for each, (first, end) in zip(model.trainable, rows, strict=True)
        ]
    owned = [PlannedRange(index, each.numel, each.dtype, None) for index, each in enumerate(model.trainable)]
    buckets: list[PlannedBucket] = []
    if ranks > 1:
        owned, buckets = _sharded(model, job.bucket_numel, choice.stage, (ranks, rank), numels)
    moves = staged and choice.offload == "cpu"
    kept = kept_on_device([each.numel for each in owned], choice.ratio if moves else 1.0)
    gradient_dtype = None if ranks == 1 else torch.float32
    on_host = [(index, each.numel - kept[index], each.dtype) for index, each in enumerate(owned)]
    on_device = [(index, kept[index], each.dtype) for index, each in enumerate(owned)]
    host = _tiles(on_host, job.tile_numel or default_tile_numel(moves, threads), gradient_dtype)
    device = _tiles(on_device, job.tile_numel or default_tile_numel(False, 1), gradient_dtype)
    if staged and choice.offload == "none":
        host, device = (), host
    return RankLayout(model, job, choice, ranks, staged, tuple(owned), tuple(buckets), host, device, tuple(numels))


def _sharded(
    model: PlannedModel, bucket_numel: int, stage: int, place: tuple[int, int], numels: Sequence[int]
) -> tuple[list[PlannedRange], list[PlannedBucket]]:
    """Return the ranges and buckets of one of several ranks; ``place`` is the number of ranks and the rank."""
    ranks, rank = place
    # At stage 3, a bucket has parameters of one unit.
    keyed = [
        (index, each.numel, (each.dtype, each.unit) if stage == 3 else each.dtype)
        for index, each in enumerate(model.trainable)
    ]
    filled = fill_buckets(keyed, ReductionSettings(stage, bucket_numel).bucket_numel)
    owned: list[PlannedRange] = []
    buckets: list[PlannedBucket] = []
    for bucket, members in enumerate(filled):
        dtype = model.trainable[members[0][0]].dtype
        if stage == 3:
            ranges = [(index, numels[index]) for index, _ in members if numels[index] > 0]
            shard_numel = sum(numel for _, numel in ranges)
        else:
            shard_numel = shard_numel_of(members, ranks)
            shards = range(ranks) if stage == 0 else (rank,)
            ranges = members
            if stage > 0 or ranks * len(filled) <= _MOST_RANGES:
                ranges = [(part[0], part[2]) for each in shards for part in shard_parts(members, shard_numel, each)]
        owned += [PlannedRange(index, numel, dtype, bucket) for index, numel in ranges]
        numel = sum(numel for _, numel in members)
        buckets.append(PlannedBucket(tuple(index for index, _ in members), numel, shard_numel, dtype))
    return owned[::-1], buckets  # the engine gives shards to its store in this order


def _tiles(
    ranges: Sequence[tuple[int, int, torch.dtype]], tile_numel: int, gradient_dtype: torch.dtype | None
) -> tuple[TileGroup, ...]:
    by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
    for index, numel, dtype in ranges:
        if numel > 0:
            by_dtype.setdefault(dtype, []).append((index, numel))
    return tuple(
        TileGroup(run, dtype, gradient_dtype or dtype)
        for dtype, members in by_dtype.items()
        for run in count_tiles(members, tile_numel)
    )


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one rank when it stores the most: after backward, before ``step()``."""

    host: dict[str, int]  # by the kinds of ``engine.explain().host_bytes``, exact to the byte
    host_estimates: dict[str, int]  # what the engine does not count: frozen parameters that rest there
    device: dict[str, int]  # by the kinds of ``engine.explain().device_bytes``, exact to the byte
    device_estimates: dict[str, int]  # what the engine does not count: activations, gradients under way

    @property
    def host_total(self) -> int:
        return sum(self.host.values()) + sum(self.host_estimates.values())

    @property
    def device_total(self) -> int:
        return sum(self.device.values()) + sum(self.device_estimates.values())


def count_bytes(layout: RankLayout) -> PlannedBytes:
    """Count all bytes of a layout."""
    job, choice = layout.job, layout.choice
    trainable = zip(layout.numels, layout.model.trainable, strict=True)
    parameters = sum(numel * each.dtype.itemsize for numel, each in trainable)
    offloads = choice.offload == "cpu"
    arrivals = job.accumulation if layout.ranks == 1 or layout.reduces_each_backward else 1
    host = _store_bytes(layout, layout.host, arrivals, layout.staged and offloads, layout.speculation)
    if choice.streams:
        frozen = parameter_bytes([each for each in layout.model.parameters if not each.trainable])
        device = {"parameters": streamed_bytes(layout.model)} if layout.ranks == 1 else {}
        host_estimates = {"frozen": frozen // layout.ranks} if frozen else {}
        return PlannedBytes({**host, "parameters": parameters}, host_estimates, device, _estimates(layout))
    device = {"parameters": parameters, "gradients": 0}
    if layout.staged and (not offloads or choice.ratio != 1.0):
        for kind, count in _store_bytes(layout, layout.device, arrivals, False, 0).items():
            device[kind] = device.get(kind, 0) + count
    return PlannedBytes(host, {}, device, _estimates(layout))


def streamed_bytes(model: PlannedModel) -> int:
    """Return the most bytes of parameters that are on the device at once: two units, one of which is used next, and
    what is in none."""
    units, rest = _unit_bytes(model)
    return rest + max(map(sum, zip(units, [*units[1:], 0], strict=True)), default=0)


def _unit_bytes(model: PlannedModel) -> tuple[list[int], int]:
    """Return the bytes of each unit, in order, and of what is in none."""
    sizes = {unit: parameter_bytes(members) for unit, members in by_unit(model.parameters).items()}
    rest = sizes.pop(None, 0)
    return [sizes.get(unit, 0) for unit in range(model.units)], rest


def spare_tiles(groups: Sequence[TileGroup], state_arrays: int, speculation: int | str) -> tuple[int, int]:
    """Return how many tiles (the last ones) have a spare, and the bytes of all spares."""
    if not speculation:
        return 0, 0
    state_bytes = _FLOAT_BYTES * state_arrays
    sizes = [(run.tiles, state_bytes * run.buffer_numel, dtype.itemsize * run.buffer_numel) for run, dtype, _ in groups]
    budget = speculation_budget(speculation, sum(count * (state + output) for count, state, output in sizes))
    tiles = total = 0
    for count, state, output in reversed(sizes):
        granted = min(count, budget // (state + output))
        tiles += granted
        total += granted * (state + padded_bytes(output))
        budget -= granted * (state + output)
        if granted < count:
            break
    return tiles, total


def _store_bytes(
    layout: RankLayout, groups: Sequence[TileGroup], arrivals: int, moves: bool, speculation: int | str
) -> dict[str, int]:
    """Count the bytes by the kinds of ``TileStore.state_bytes``.

    ``arrivals``: gradients of one parameter in an accumulation window; ``moves``: whether they are copied from a
    device.
    """
    buffers = gradients = accumulators = tiles = landing = 0
    staged = []
    for run, dtype, gradient_dtype in groups:
        tiles += run.tiles
        arrays = layout.job.state_arrays - layout.own_master(dtype)
        buffers += run.tiles * _FLOAT_BYTES * arrays * run.buffer_numel
        if moves:
            slot_bytes = padded_bytes(run.buffer_numel * gradient_dtype.itemsize)
            gradients += run.tiles * slot_bytes
            landing = max(landing, slot_bytes)
            if gradient_dtype != dtype and layout.publishes:
                staged.append(run.buffer_numel * dtype.itemsize)
        elif arrivals == 1:
            gradients += run.tiles * run.numel * gradient_dtype.itemsize
        if arrivals > 1:
            accumulators += run.tiles * _FLOAT_BYTES * run.buffer_numel
    return {
        "state": buffers,
        "gradients": gradients,
        "spares": spare_tiles(groups, layout.job.state_arrays, speculation)[1],
        "staging": LANDING_SLOTS * landing + (min(PIPELINE_DEPTH, tiles) * padded_bytes(max(staged)) if staged else 0),
        "accumulators": accumulators,
    }


def _estimates(layout: RankLayout) -> dict[str, int]:
    """Estimate the bytes on the device that the engine does not count."""
    model, job, buckets = layout.model, layout.job, layout.buckets
    gradients = parameter_bytes(model.trainable)
    frozen = [] if layout.choice.streams else [each for each in model.parameters if not each.trainable]
    found = {
        "activations": _activation_bytes(model, job),
        "buffers and frozen": model.buffer_bytes + parameter_bytes(frozen),
    }
    if layout.ranks == 1:
        if layout.choice.streams:
            # Those of one unit, or of what is in none, may be on their way to the host.
            units = by_unit(model.trainable).values()
            found["gradients under way"] = max(map(parameter_bytes, units), default=0)
            # Where the order changes, any two follow one another: longshore.stream() makes sure that they fit.
            sizes, rest = _unit_bytes(model)
            if (more := rest + sum(sorted(sizes)[-2:]) - streamed_bytes(model)) > 0:
                found["units in another order"] = more
        elif layout.host:
            found["gradients under way"] = min(_IN_FLIGHT_BYTES, gradients)
        return found
    if layout.reduces_each_backward:
        # One bucket fills while another one is reduced.
        largest = max((bucket.numel * bucket.dtype.itemsize for bucket in buckets), default=0)
        found["gradients under way"] = min(2 * largest, gradients)
    else:
        numel = sum(each.numel for each in model.trainable)
        found["gradients of the window"] = gradients if job.accumulation == 1 else _FLOAT_BYTES * numel
    if layout.choice.offload == "cpu":
        # A reduced shard is float32 until it is copied.
        found["reduced, under way"] = 2 * _FLOAT_BYTES * max((bucket.shard_numel for bucket in buckets), default=0)
    itemsize = max((bucket.dtype.itemsize for bucket in buckets), default=0)
    most = max((bucket.numel for bucket in buckets), default=0)
    found["sent and received"] = 2 * min(DEVICE_SLICE_NUMEL, most) * itemsize
    if layout.choice.stage == 3:
        sizes = {unit: parameter_bytes(members) for unit, members in by_unit(model.parameters).items()}
        root = sizes.pop(None, 0)
        # The unit in use, the next one, and the parameters that belong to no unit.
        two = sum(sorted(sizes.values())[-2:])
        found["gathered"] = root + two
        if layout.choice.streams:  # each rank's shards of what is gathered
            found["shards going up"] = (root + two) // layout.ranks
    return found


def _activation_bytes(model: PlannedModel, job: Job) -> int:
    """Estimate what forward keeps for backward: inputs and outputs of each matrix, and the logits."""
    itemsize = max((each.dtype.itemsize for each in model.parameters), default=2)
    units = {unit: sum(each.width for each in members) for unit, members in by_unit(model.parameters).items()}
    kept = sum(units.values())
    if job.checkpointing and model.units:
        outside = units.pop(None, 0.0)
        kept = outside + model.units * model.hidden_size + max(units.values(), default=0.0)
    # The loss keeps logits in the model's dtype and in float32, each with its gradient.
    logits = model.vocabulary * (2 * itemsize + 2 * _FLOAT_BYTES)
    return round(job.tokens * (kept * itemsize + logits))
