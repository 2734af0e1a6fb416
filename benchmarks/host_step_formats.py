"""The host step with states in other formats than float32, beside the contestants of the host step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from benchmarks.report import Row, at_least, at_most
from benchmarks.timing import least_ratio, paired_ratio
from longshore.kernels import EncodedBuffer, HostKernels, Rule, Scale, TileSegment, new_buffer
from longshore.layout.formats import Coding, StateFormat
from longshore.tiles.memory import allocate_zeros

BYTES_PER_PARAMETER = {StateFormat.BF16: 20.0, StateFormat.EIGHT_BIT: 16.25}
"""Master read and written (8), gradient read, parameter written (4), states read and written."""
GOALS = {StateFormat.BF16: 0.8, StateFormat.EIGHT_BIT: 0.7}
"""Largest share of the time of the step with float32 states."""


def name_of(format: StateFormat) -> str:
    """Return the name of the contestant."""
    return f"states_{format.value}"


def steps(state: Tensor, slot: Tensor, threads: int, rule: Rule, scale: Scale) -> dict[str, Callable[[], None]]:
    """Return a step for each format, of buffers that hold what ``state``, float32 ``[3, numel]``, holds now."""
    kernels = HostKernels(threads)
    return {name_of(format): _step(kernels, format, state, slot, rule, scale) for format in BYTES_PER_PARAMETER}


def _step(
    kernels: HostKernels, format: StateFormat, state: Tensor, slot: Tensor, rule: Rule, scale: Scale
) -> Callable[[], None]:
    numel = slot.numel()
    buffer = new_buffer(format, 3, numel, False, allocate_zeros)
    assert isinstance(buffer, EncodedBuffer)
    buffer.master.copy_(state[0])
    buffer.encode(0, slice(0, numel), False, state[1])
    buffer.encode(1, slice(0, numel), True, state[2])
    table = [TileSegment(0, slot, slot, 0, Coding(format, stream=1))]
    return lambda: kernels.step_tile(buffer, buffer, table, [rule], scale)


def rows(part: str, results: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the table: time over that of float32 states, and the share of the floor's bandwidth."""
    times = {name: entry["rounds_s"] for name, entry in results["times"].items()}
    medians = {name: entry["median_s"] for name, entry in results["times"].items()}
    numel, table = results["settings"]["numel"], []
    for format, each_bytes in BYTES_PER_PARAMETER.items():
        name = name_of(format)
        speed = f"{1e3 * medians[name]:.0f} ms, {each_bytes * numel / medians[name] / 1e9:.1f} GB/s"
        note = f"{speed}; best rounds: {least_ratio(times[name], times['ours']):.3g}"
        ratio = paired_ratio(times[name], times["ours"])
        table.append(at_most(part, f"{format.value} states: time over fp32 states'", ratio, "x", GOALS[format], note))
        if "floor" in times:
            share = paired_ratio(times["floor"], times[name]) * each_bytes / results["bytes_per_parameter"]
            table.append(at_least(part, f"{format.value} states: of the floor's bandwidth", share, "", 0.85, ""))
    peer, ours = "deepspeed_bf16", name_of(StateFormat.BF16)
    what = "DeepSpeed CPUAdam, masters and states in bf16: its time over ours with bf16 states"
    if peer in times:
        note = f"{1e3 * medians[peer]:.0f} ms; best rounds: {least_ratio(times[peer], times[ours]):.3g}"
        table.append(Row(part, what, paired_ratio(times[peer], times[ours]), "x", note=note))
    else:
        table.append(Row(part, what, None, "", note=results["missing"][peer]))
    return table
