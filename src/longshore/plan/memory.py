"""The bytes of one rank's layout: those that the engine counts, to the byte, and estimates of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longshore.plan.job import Job, PlannedModel, by_unit, parameter_bytes
from longshore.plan.layout import RankLayout
from longshore.plan.matrices import staging_bytes, transforming_bytes
from longshore.seam import DEVICE_SLICE_NUMEL, Home, Spares, speculation_budget

_FLOAT_BYTES = 4
_IN_FLIGHT_BYTES = 1 << 28
"""Maximum bytes of gradients that wait for their copies to the host."""
_TRANSFORMING = "matrices under way"


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
    trainable = zip(layout.numels, layout.model.trainable, strict=True)
    parameters = sum(numel * each.dtype.itemsize for numel, each in trainable)
    of_main = layout.main.memory(layout.arrivals, spares_of(layout), layout.sums_on_device)
    of_main["staging"] += staging_bytes(layout.batches)
    host, device = dict.fromkeys(of_main, 0), {"parameters": parameters, "gradients": 0}
    for home in layout.homes:
        counted = of_main if home is layout.main else home.memory(layout.arrivals)
        _add(host if home.home is Home.HOST else device, counted)
    if layout.choice.streams:
        frozen = parameter_bytes([each for each in layout.model.parameters if not each.trainable])
        device = {"parameters": streamed_bytes(layout.model)} if layout.ranks == 1 else {}
        host_estimates = {"frozen": frozen // layout.ranks} if frozen else {}
        if layout.transforms_on_host and layout.batches:
            host_estimates[_TRANSFORMING] = transforming_bytes(layout.batches, 1, 0)
        return PlannedBytes({**host, "parameters": parameters}, host_estimates, device, _estimates(layout))
    return PlannedBytes(host, {}, device, _estimates(layout))


def _add(counted: dict[str, int], more: Mapping[str, int]) -> None:
    for kind, count in more.items():
        counted[kind] = counted.get(kind, 0) + count


def streamed_bytes(model: PlannedModel) -> int:
    """Return the most bytes of parameters that are on the device at once: two units, one of which is used next, and the
    parameters of none."""
    units, rest = _unit_bytes(model)
    return rest + max(map(sum, zip(units, [*units[1:], 0], strict=True)), default=0)


def _unit_bytes(model: PlannedModel) -> tuple[list[int], int]:
    """Return the bytes of each unit, in order, and of the rest."""
    sizes = {unit: parameter_bytes(members) for unit, members in by_unit(model.parameters).items()}
    rest = sizes.pop(None, 0)
    return [sizes.get(unit, 0) for unit in range(model.units)], rest


def spares_of(layout: RankLayout) -> Spares:
    """Return the spares of the tiles of the last home; there are none if that is the device."""
    return layout.main.spares(lambda most, taken: speculation_budget(layout.speculation, most, taken))


def _estimates(layout: RankLayout) -> dict[str, int]:
    """Estimate the bytes on the device that the engine does not count."""
    model, job, buckets = layout.model, layout.job, layout.buckets
    gradients = parameter_bytes(model.trainable)
    frozen = [] if layout.choice.streams else [each for each in model.parameters if not each.trainable]
    found = {
        "activations": _activation_bytes(model, job),
        "buffers and frozen": model.buffer_bytes + parameter_bytes(frozen),
    }
    if layout.sums_on_device:
        found["sums of gradients"] = _FLOAT_BYTES * sum(run.tiles * run.numel for run in layout.main.runs)
    if layout.batches and not layout.transforms_on_host:
        found[_TRANSFORMING] = transforming_bytes(layout.batches, layout.ranks, layout.rank)
    if layout.ranks == 1:
        if layout.choice.streams:
            # Those of one unit, or of what is in none, may be on their way to the host.
            units = by_unit(model.trainable).values()
            found["gradients under way"] = max(map(parameter_bytes, units), default=0)
            # Where the order changes, any two follow one another: longshore.stream() makes sure that they fit.
            sizes, rest = _unit_bytes(model)
            if (more := rest + sum(sorted(sizes)[-2:]) - streamed_bytes(model)) > 0:
                found["units in another order"] = more
        elif layout.main.home is Home.HOST and layout.main.runs:
            found["gradients under way"] = min(_IN_FLIGHT_BYTES, gradients)
        return found
    if layout.reduces_each_backward:
        # One bucket fills while another one is reduced.
        largest = max((bucket.numel * bucket.dtype.itemsize for bucket in buckets), default=0)
        found["gradients under way"] = min(2 * largest, gradients)
    else:
        numel = sum(each.numel for each in model.trainable)
        found["gradients of the window"] = gradients if job.accumulation == 1 else _FLOAT_BYTES * numel
    if layout.choice.offloads:
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
    """Estimate the activations that forward keeps for backward: inputs and outputs of each matrix, and the logits."""
    itemsize = max((each.dtype.itemsize for each in model.parameters), default=2)
    units = {unit: sum(each.width for each in members) for unit, members in by_unit(model.parameters).items()}
    kept = sum(units.values())
    if job.checkpointing and model.units:
        outside = units.pop(None, 0.0)
        kept = outside + model.units * model.hidden_size + max(units.values(), default=0.0)
    # The loss keeps logits in the model's dtype and in float32, each with its gradient.
    logits = model.vocabulary * (2 * itemsize + 2 * _FLOAT_BYTES)
    return round(job.tokens * (kept * itemsize + logits))
