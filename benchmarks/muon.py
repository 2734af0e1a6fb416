"""Steps of Muon: longshore's beside ``torch.optim.Muon`` on float32 masters by hand, and what its parts take.

The matrices are those of a Llama. The elementwise parts move 24 bytes a parameter: momentum read and written, a bf16
gradient read and a bf16 matrix written (12), master read and written, the bf16 update read and the bf16 parameter
written (12). The floor is a loop of the same reads and writes that computes nothing; AdamW's floor moves 28.

What is exposed with stepping ahead is measured beside a device whose backward takes its time, without the iterations,
which are the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from benchmarks import overlap
from benchmarks.floor import NotAvailable, load_floor, load_floor_of_two_bytes
from benchmarks.host_step import Arrays
from benchmarks.report import Row, at_least, at_most
from benchmarks.timing import Case, Note, interleave, least_ratio, paired_ratio, summary
from longshore.kernels import HostKernels, Outputs, Scale, TileSegment, newton_schulz
from longshore.optim.rules.muon import MomentumRule, UpdateRule

PART = "Muon"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOVED_BYTES, FLOOR_BYTES = 24, 28
TILE_NUMEL = 1 << 22


@dataclass(frozen=True)
class Settings:
    """Sizes of the model whose matrices are stepped, and ``numel`` of the elementwise parts alone."""

    hidden_size: int
    layers: int
    intermediate_size: int
    threads: int
    rounds: int
    numel: int
    layers_ahead: int = 48
    """Matrices of ``side_ahead`` rows and columns, which are stepped ahead."""
    side_ahead: int = 1448

    @property
    def shapes(self) -> list[tuple[int, int]]:
        wide = (self.intermediate_size, self.hidden_size)
        return [*[(self.hidden_size, self.hidden_size)] * 4, wide, wide, wide[::-1]] * self.layers


def _parameters(settings: Settings) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).mul_(0.02).bfloat16()) for shape in settings.shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).mul_(1e-3).bfloat16()
    return parameters


def ours(settings: Settings) -> Callable[[], None]:
    """``longshore.Muon`` on bf16 parameters with gradients."""
    optimizer = longshore.Muon(_parameters(settings), offload=longshore.Offload(threads=settings.threads))
    return lambda: optimizer.step() and None


def by_hand(settings: Settings) -> Callable[[], None]:
    """``torch.optim.Muon`` on float32 masters, with casts of gradients and parameters, in memory that is kept."""
    parameters = _parameters(settings)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.Muon(masters)

    @torch.no_grad()
    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None and master.grad is not None
            master.grad.copy_(parameter.grad)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)

    return step


def iterations(settings: Settings, transform: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """The Newton-Schulz iteration alone, on all matrices."""
    matrices = [parameter.grad for parameter in _parameters(settings)]

    def run() -> None:
        for matrix in matrices:
            assert matrix is not None
            transform(matrix.clone())

    return run


def elementwise(arrays: Arrays, settings: Settings) -> Callable[[], None]:
    """Both passes of a step on the host, on one parameter."""
    kernels, numel = HostKernels(settings.threads), settings.numel
    master, momentum = arrays.state_buffers[0][:1], arrays.state_buffers[0][1:2]
    gradient, update, output = arrays.gradient, arrays.slot, arrays.output
    first, last = MomentumRule(0.95, True), UpdateRule(1e-3, 1 - 1e-4)

    def run() -> None:
        for start in range(0, numel, TILE_NUMEL):
            here = slice(start, start + TILE_NUMEL)
            rows = [TileSegment(start, gradient[here], update[here], 0)]
            kernels.step_tile(momentum, momentum, rows, [first], Scale(0.5), Outputs.WRITTEN)
        for start in range(0, numel, TILE_NUMEL):
            here = slice(start, start + TILE_NUMEL)
            rows = [TileSegment(start, update[here], output[here], 0)]
            kernels.step_tile(master, master, rows, [last], Scale(1.0), Outputs.WRITTEN)

    return run


def floor_of_passes(arrays: Arrays, settings: Settings) -> Callable[[], None]:
    """The reads and writes of :func:`elementwise`, and nothing else."""
    floor = load_floor_of_two_bytes(settings.threads)
    master, momentum = arrays.state_buffers[0][0], arrays.state_buffers[0][1]

    def run() -> None:
        floor(momentum, arrays.gradient, arrays.slot)
        floor(master, arrays.slot, arrays.output)

    return run


def ahead(settings: Settings, note: Note) -> dict[str, Any]:
    """Seconds of backward and of the exposed host step, with and without a spare for every tile."""
    side = settings.side_ahead
    sizes = overlap.Settings(settings.layers_ahead, side * side, settings.threads, settings.rounds)

    def muon(weights: list[nn.Parameter], offload: longshore.Offload) -> Any:
        return longshore.Muon(weights, ns_steps=0, release_gradients=True, offload=offload)

    pause, contestants = [0.0], {}
    for name, memory in ((overlap.OFF, 0), (overlap.ALL, "100%")):
        contestants[name] = overlap.Contestant(sizes, memory, 1e9, pause, muon, (side, side))
        contestants[name].time_apart(contestants[name].optimizer._core.members.store.tiles.tier.exchange, "begin")
    return overlap.take_turns(contestants, sizes, pause, note)


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from torch.optim import _muon  # pyright: ignore[reportAttributeAccessIssue]  # torch 2.8 has none

    settings = Settings(**values)
    torch.set_num_threads(settings.threads)

    def torchs(matrix: Tensor) -> Tensor:
        return _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)

    cases = {
        "ours": Case(ours(settings)),
        "by hand": Case(by_hand(settings)),
        "our iteration": Case(iterations(settings, lambda matrix: newton_schulz(matrix, COEFFICIENTS, 5, 1e-7))),
        "torch's iteration": Case(iterations(settings, torchs)),
    }
    seconds = interleave(cases, settings.rounds, note, warmups=2)
    arrays = Arrays(settings.numel)
    parts = {"elementwise": Case(elementwise(arrays, settings))}
    missing = ""
    try:
        floor = load_floor(settings.threads)
        parts["AdamW's floor"] = Case(lambda: floor(arrays.other_state, arrays.gradient32))
        parts["floor"] = Case(floor_of_passes(arrays, settings))
    except NotAvailable as reason:
        missing = str(reason)
    seconds |= interleave(parts, settings.rounds, note, warmups=2)
    return {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "no_floor": missing,
        "times": {name: summary(found) for name, found in seconds.items()},
        "ahead": ahead(settings, note),
    }


def rows(results: Mapping[str, Any]) -> list[Row]:
    times = {name: found["rounds_s"] for name, found in results["times"].items()}
    medians = {name: found["median_s"] for name, found in results["times"].items()}

    def ratio(what: str, name: str, other: str, goal: float) -> Row:
        note = (
            f"{medians[name]:.3g} s, {medians[other]:.3g} s; best rounds: {least_ratio(times[name], times[other]):.3g}"
        )
        return at_most(PART, what, paired_ratio(times[name], times[other]), "x", goal, note)

    table = [
        ratio("step over torch.optim.Muon on float32 masters by hand", "ours", "by hand", 1.0),
        ratio("Newton-Schulz over torch's", "our iteration", "torch's iteration", 1.05),
    ]
    share = medians["our iteration"] / medians["ours"]
    table.append(_ahead_row(results))
    table.append(Row(PART, "share of Newton-Schulz in the step", share, "", note="the rest is elementwise"))
    what = "elementwise parts: share of the bandwidth of a bare loop of the same reads and writes"
    if results["no_floor"]:
        return [*table, Row(PART, what, None, "", note=results["no_floor"])]
    moved, bare = (
        MOVED_BYTES * results["settings"]["numel"] / medians[name] / 1e9 for name in ("elementwise", "floor")
    )
    adamws = FLOOR_BYTES * results["settings"]["numel"] / medians["AdamW's floor"] / 1e9
    said = f"{moved:.1f} GB/s, the loop {bare:.1f}; a loop that writes only what it has read: {adamws:.1f}"
    return [*table, at_least(PART, what, paired_ratio(times["floor"], times["elementwise"]), "x", 0.9, said)]


def _ahead_row(results: Mapping[str, Any]) -> Row:
    cases = results["ahead"]
    exposed = {name: median(each["exposed"]) for name, each in cases.items()}
    found = median(
        ahead / usual for ahead, usual in zip(cases[overlap.ALL]["exposed"], cases[overlap.OFF]["exposed"], strict=True)
    )
    record = cases[overlap.ALL]["speculation"]
    said = f"{record['kept']} tiles kept, {1e3 * exposed[overlap.ALL]:.1f} ms of {1e3 * exposed[overlap.OFF]:.1f}"
    return at_most(PART, "stepped ahead: exposed, of the host's part of the step", found, "", 0.6, said)
