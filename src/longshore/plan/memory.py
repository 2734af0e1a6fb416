"""Bytes by kind on one rank, as the engine counts them, and estimates of what it does not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longshore.host.events import PIPELINE_DEPTH
from longshore.host.memory import padded_bytes
from longshore.host.speculation import speculation_budget
from longshore.plan.choice import Choice, Job
from longshore.plan.layout import RankLayout, TileGroup
from longshore.plan.model import PlannedModel, by_unit, parameter_bytes
from longshore.sharding.reduction import SLICE_NUMEL
from longshore.sharding.stages import reduces_each_backward

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class PlannedBytes:
    """Of one rank, at its fullest: backward is over, and ``step()`` has not begun.

    Attributes:
        host: by the kinds of ``engine.explain().host_bytes``, to the byte.
        device: by those of ``engine.explain().device_bytes``, to the byte.
        device_estimates: what the engine does not count, by kind: activations and what is under way.
    """

    host: dict[str, int]
    device: dict[str, int]
    device_estimates: dict[str, int]

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def device_total(self) -> int:
        return sum(self.device.values()) + sum(self.device_estimates.values())


class _Spares(NamedTuple):
    tiles: int
    bytes: int


def count_bytes(
    model: PlannedModel, job: Job, choice: Choice, layout: RankLayout, ranks: int, staged: bool
) -> PlannedBytes:
    """All bytes of a choice; the arguments are those of :func:`longshore.plan.layout.lay_out`, and what it returned."""
    trainable = model.cast(job.dtype).trainable
    parameters = sum(numel * each.dtype.itemsize for numel, each in zip(layout.numels_held, trainable, strict=True))
    arrivals = job.accumulation if ranks == 1 or reduces_each_backward(choice.stage) else 1
    moves = staged and choice.offload == "cpu"
    # Nothing is stepped ahead of gradients where the optimizer's state is on the device.
    speculation = choice.speculation if choice.offload == "cpu" else 0
    host = _store_bytes(layout.host, job, arrivals, moves, speculation)
    device = {"parameters": parameters, "gradients": 0}
    if staged and choice.offload == "none":
        host = dict.fromkeys(host, 0)
    if layout.device or (staged and choice.offload == "cpu" and choice.ratio != 1.0):
        for kind, count in _store_bytes(layout.device, job, arrivals, False, 0).items():
            device[kind] = device.get(kind, 0) + count
    elif staged and choice.offload == "none":
        device |= {kind: device.get(kind, 0) for kind in host}
    return PlannedBytes(host, device, _estimates(model, job, choice, layout, ranks))


def spare_tiles(groups: Sequence[TileGroup], page_arrays: int, speculation: int | str) -> _Spares:
    """How many tiles, the last ones, have a spare, and the bytes of all spares."""
    sizes = [
        (group.run.tiles, _page_bytes(group, page_arrays), group.run.page_numel * group.dtype.itemsize)
        for group in groups
    ]
    if not speculation:
        return _Spares(0, 0)
    budget = speculation_budget(speculation, sum(count * (page + output) for count, page, output in sizes))
    tiles = total = 0
    for count, page, output in reversed(sizes):
        granted = min(count, budget // (page + output))
        tiles += granted
        total += granted * (page + padded_bytes(output))
        budget -= granted * (page + output)
        if granted < count:
            break
    return _Spares(tiles, total)


def _page_bytes(group: TileGroup, page_arrays: int) -> int:
    return _FLOAT_BYTES * page_arrays * group.run.page_numel


def _store_bytes(
    groups: Sequence[TileGroup], job: Job, arrivals: int, moves: bool, speculation: int | str
) -> dict[str, int]:
    """By the kinds of ``HostStore.state_bytes``."""
    pages = gradients = accumulators = 0
    passing = []
    tiles = 0
    for run, dtype, gradient_dtype in groups:
        tiles += run.tiles
        pages += run.tiles * _FLOAT_BYTES * job.page_arrays * run.page_numel
        if moves:
            gradients += run.tiles * padded_bytes(run.page_numel * gradient_dtype.itemsize)
            if gradient_dtype != dtype:
                passing.append(run.page_numel * dtype.itemsize)
        elif arrivals == 1:
            gradients += run.tiles * run.numel * gradient_dtype.itemsize
        if arrivals > 1:
            accumulators += run.tiles * _FLOAT_BYTES * run.page_numel
    return {
        "pages": pages,
        "gradients": gradients,
        "spares": spare_tiles(groups, job.page_arrays, speculation).bytes,
        "staging": min(PIPELINE_DEPTH, tiles) * padded_bytes(max(passing)) if passing else 0,
        "accumulators": accumulators,
    }


def _estimates(model: PlannedModel, job: Job, choice: Choice, layout: RankLayout, ranks: int) -> dict[str, int]:
    cast = model.cast(job.dtype)
    found = {
        "activations": activation_bytes(cast, job),
        "buffers and frozen": model.buffer_bytes
        + parameter_bytes([each for each in cast.parameters if not each.trainable]),
    }
    if ranks > 1:
        found |= _under_way(cast, job, choice, layout)
    elif any(group.run.tiles for group in layout.host):
        # Copies that were asked for hold their gradients; the bound of a transfer that is let to run ahead.
        found["gradients under way"] = min(_IN_FLIGHT_BYTES, parameter_bytes(cast.trainable))
    return found


_IN_FLIGHT_BYTES = 1 << 28


def _under_way(model: PlannedModel, job: Job, choice: Choice, layout: RankLayout) -> dict[str, int]:
    found: dict[str, int] = {}
    gradients = parameter_bytes(model.trainable)
    if reduces_each_backward(choice.stage):
        # One bucket fills while another is on its way.
        largest = max((bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets), default=0)
        found["gradients under way"] = min(2 * largest, gradients)
    else:
        numel = sum(each.numel for each in model.trainable)
        found["gradients of the window"] = gradients if job.accumulation == 1 else _FLOAT_BYTES * numel
    if choice.offload == "cpu":
        # What a reduction brought is float32 until it is copied.
        largest = max((bucket.shard_numel for bucket in layout.buckets), default=0)
        found["reduced, under way"] = 2 * _FLOAT_BYTES * largest
    itemsize = max((bucket.dtype.itemsize for bucket in layout.buckets), default=0)
    found["sent and received"] = 2 * SLICE_NUMEL * itemsize
    if choice.stage == 3:
        sizes = {unit: parameter_bytes(members) for unit, members in by_unit(model.parameters).items()}
        root = sizes.pop(None, 0)
        # The one that is used, the next one, and what no unit has.
        found["gathered"] = root + sum(sorted(sizes.values())[-2:])
    return found


def activation_bytes(model: PlannedModel, job: Job) -> int:
    """What backward finds of forward, roughly: what goes in and out of each matrix, and the logits."""
    itemsize = max((each.dtype.itemsize for each in model.parameters), default=2)
    units = {unit: sum(each.width for each in members) for unit, members in by_unit(model.parameters).items()}
    if job.checkpointing and model.units:
        inner = [width for unit, width in units.items() if unit is not None]
        kept = units.get(None, 0.0) + model.units * model.hidden_size + max(inner, default=0.0)
    else:
        kept = sum(units.values())
    # The loss has them in the model's dtype, and, with their gradient, in float32.
    logits = model.vocabulary * (2 * itemsize + 2 * _FLOAT_BYTES)
    return round(job.tokens * (kept * itemsize + logits))
