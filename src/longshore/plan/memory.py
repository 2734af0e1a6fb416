"""Bytes on one rank by kind: those that the engine counts, and estimates of those that it does not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.host.events import PIPELINE_DEPTH
from longshore.host.memory import padded_bytes
from longshore.host.speculation import speculation_budget
from longshore.plan.job import Job
from longshore.plan.layout import RankLayout, TileGroup
from longshore.plan.model import PlannedModel, by_unit, parameter_bytes
from longshore.sharding.reduction import SLICE_NUMEL

_FLOAT_BYTES = 4
_IN_FLIGHT_BYTES = 1 << 28
"""Most bytes of gradients that wait for their copies to the host."""


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one rank when it stores the most: after backward, before ``step()``."""

    host: dict[str, int]  # by the kinds of ``engine.explain().host_bytes``, exact to the byte
    device: dict[str, int]  # by the kinds of ``engine.explain().device_bytes``, exact to the byte
    device_estimates: dict[str, int]  # what the engine does not count: activations, gradients under way

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def device_total(self) -> int:
        return sum(self.device.values()) + sum(self.device_estimates.values())


def count_bytes(layout: RankLayout) -> PlannedBytes:
    """All bytes of a layout."""
    job, choice = layout.job, layout.choice
    trainable = zip(layout.numels, layout.model.trainable, strict=True)
    device = {"parameters": sum(numel * each.dtype.itemsize for numel, each in trainable), "gradients": 0}
    offloads = choice.offload == "cpu"
    arrivals = job.accumulation if layout.ranks == 1 or layout.reduces_each_backward else 1
    # Nothing is stepped ahead where the optimizer's state is on the device.
    host = _store_bytes(layout.host, job, arrivals, layout.staged and offloads, choice.speculation if offloads else 0)
    if layout.staged and (not offloads or choice.ratio != 1.0):
        for kind, count in _store_bytes(layout.device, job, arrivals, False, 0).items():
            device[kind] = device.get(kind, 0) + count
    return PlannedBytes(host, device, _estimates(layout))


def spare_tiles(groups: Sequence[TileGroup], state_arrays: int, speculation: int | str) -> tuple[int, int]:
    """How many tiles have a spare state buffer (they are the last ones), and the bytes of all spares."""
    if not speculation:
        return 0, 0
    state_bytes = _FLOAT_BYTES * state_arrays
    sizes = [(run.tiles, state_bytes * run.page_numel, dtype.itemsize * run.page_numel) for run, dtype, _ in groups]
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
    groups: Sequence[TileGroup], job: Job, arrivals: int, moves: bool, speculation: int | str
) -> dict[str, int]:
    """Bytes by the kinds of ``HostStore.state_bytes``.

    ``arrivals``: gradients of one parameter in an accumulation window; ``moves``: they are copied from a device.
    """
    pages = gradients = accumulators = tiles = 0
    staged = []
    for run, dtype, gradient_dtype in groups:
        tiles += run.tiles
        pages += run.tiles * _FLOAT_BYTES * job.state_arrays * run.page_numel
        if moves:
            gradients += run.tiles * padded_bytes(run.page_numel * gradient_dtype.itemsize)
            if gradient_dtype != dtype:
                staged.append(run.page_numel * dtype.itemsize)
        elif arrivals == 1:
            gradients += run.tiles * run.numel * gradient_dtype.itemsize
        if arrivals > 1:
            accumulators += run.tiles * _FLOAT_BYTES * run.page_numel
    return {
        "pages": pages,
        "gradients": gradients,
        "spares": spare_tiles(groups, job.state_arrays, speculation)[1],
        "staging": min(PIPELINE_DEPTH, tiles) * padded_bytes(max(staged)) if staged else 0,
        "accumulators": accumulators,
    }


def _estimates(layout: RankLayout) -> dict[str, int]:
    """Bytes on the device that the engine does not count."""
    model, job, buckets = layout.model, layout.job, layout.buckets
    gradients = parameter_bytes(model.trainable)
    found = {
        "activations": _activation_bytes(model, job),
        "buffers and frozen": model.buffer_bytes + parameter_bytes([p for p in model.parameters if not p.trainable]),
    }
    if layout.ranks == 1:
        if layout.host:
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
    found["sent and received"] = 2 * SLICE_NUMEL * itemsize
    if layout.choice.stage == 3:
        sizes = {unit: parameter_bytes(members) for unit, members in by_unit(model.parameters).items()}
        root = sizes.pop(None, 0)
        # The unit in use, the next one, and the parameters that belong to no unit.
        found["gathered"] = root + sum(sorted(sizes.values())[-2:])
    return found


def _activation_bytes(model: PlannedModel, job: Job) -> int:
    """Roughly what forward keeps for backward: inputs and outputs of each matrix, and the logits."""
    itemsize = max((each.dtype.itemsize for each in model.parameters), default=2)
    units = {unit: sum(each.width for each in members) for unit, members in by_unit(model.parameters).items()}
    kept = sum(units.values())
    if job.checkpointing and model.units:
        outside = units.pop(None, 0.0)
        kept = outside + model.units * model.hidden_size + max(units.values(), default=0.0)
    # The loss keeps logits in the model's dtype and in float32, each with its gradient.
    logits = model.vocabulary * (2 * itemsize + 2 * _FLOAT_BYTES)
    return round(job.tokens * (kept * itemsize + logits))
