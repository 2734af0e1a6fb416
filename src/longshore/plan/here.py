"""The machine that this process runs on, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from longshore.plan.choice import Job
from longshore.plan.exchange import Exchange, ExchangeProbe
from longshore.plan.machine import Compute, PlanMachine
from longshore.plan.overheads import Overheads, OverheadsProbe
from longshore.plan.probe import measure_compute
from longshore.report import Figures, Machine, measure, read_machine

_FEWEST_TOKENS, _MOST_TOKENS = 32, 4096
_LATENCY_S = 200e-6
"""Of a meeting of two ranks over gloo, on two cores of an Intel Xeon: 178 us."""
_DEVICES_EXCHANGE_SHARE = 1 / 8
"""Of the speed of a copy in host memory, between devices: nothing is measured there."""


def this_machine(
    job: Job,
    ranks: int | None = None,
    numel: int = 1 << 26,
    rounds: int = 3,
    note: Callable[[str], None] = lambda line: None,
) -> PlanMachine:
    """Measure it; some ten seconds.

    Args:
        job: tokens and dtype that are measured.
        ranks: on this host; None: one for each CUDA device, or one.
        numel: elements that are stepped and copied.
        rounds: of each figure.
        note: is told what is measured now.

    Raises:
        ValueError: more ranks than CUDA devices.
    """
    machine = read_machine()
    devices = len(machine.gpus)
    if devices and ranks is not None and ranks > devices:
        raise ValueError(
            f"this machine has {devices} CUDA devices, and {ranks} ranks need one each; give --gpu to plan for another"
        )
    dtype = job.dtype or torch.float32
    figures = measure(numel, rounds, note)
    note("what a parameter takes")
    probe = OverheadsProbe(dtype, numel)
    overheads = probe.measure(rounds)
    probe.close()
    device = torch.device("cuda" if devices else "cpu")
    sharing = 1 if devices else ranks or 1
    exchange = None
    if sharing > 1:
        note("what ranks exchange")
        exchange = ExchangeProbe(dtype, sharing, numel // sharing).measure(rounds)
    compute = measure_compute(dtype, tokens_to_measure(job), job.seq_len, device, rounds, note, sharing)
    return of_figures(machine, figures, overheads, compute, ranks or max(1, devices), exchange)


def tokens_to_measure(job: Job) -> Sequence[int]:
    """Few, those of the job among them, and many: never more than are measured in seconds."""
    own = min(job.tokens, _MOST_TOKENS)
    return sorted({_FEWEST_TOKENS, own, min(_MOST_TOKENS, max(2 * own, 512))})


def of_figures(
    machine: Machine,
    figures: Figures,
    overheads: Overheads,
    compute: Compute,
    ranks: int,
    exchange: Exchange | None = None,
) -> PlanMachine:
    """The machine of ``longshore report``, with how fast it computes; ``exchange``: as measured, without devices."""
    gpus = machine.gpus
    limit = machine.memory.limit_bytes or machine.memory.total_bytes
    memory = min(machine.memory.available_bytes, limit)
    copied = figures.memory_copy_bytes_per_s
    assumptions = []
    if exchange is None:
        assumed = _DEVICES_EXCHANGE_SHARE * copied
        exchange = Exchange(assumed, assumed, math.inf)
        if ranks > 1:
            assumptions.append(f"between devices: {assumed / 1e9:.3g} GB/s, an eighth of a copy's in host memory")
    if gpus:
        assumptions.append("device memory is as fast as its data sheet says, or 1.5 TB/s")
    return PlanMachine(
        name=f"this machine, {ranks} x {gpus[0].name}" if gpus else f"this machine, {machine.cpu.name}, ranks: {ranks}",
        ranks=ranks,
        ranks_per_host=ranks,
        staged=bool(gpus),
        device_bytes=min((gpu.free_bytes for gpu in gpus), default=0),
        host_bytes=memory,
        host_bytes_per_s=figures.step_bytes_per_s,
        host_norm_bytes_per_s=overheads.norm_bytes_per_s,
        to_host_bytes_per_s=min(figures.from_device_bytes_per_s, default=copied),
        to_device_bytes_per_s=min(figures.to_device_bytes_per_s, default=copied),
        device_memory_bytes_per_s=_device_speed(machine) if gpus else copied,
        exchange_bytes_per_s=exchange.gather_bytes_per_s,
        reduce_bytes_per_s=exchange.reduce_bytes_per_s,
        unshard_bytes_per_s=exchange.unshard_bytes_per_s,
        latency_s=_LATENCY_S,
        compute=compute,
        arrival_s=0.0 if gpus else overheads.arrival_s,  # beside a device that computes
        bookkeeping_s=overheads.bookkeeping_s,
        assumptions=tuple(assumptions),
    )


def _device_speed(machine: Machine) -> float:
    from longshore.plan.machine import ACHIEVED_BANDWIDTH, GPUS

    name = machine.gpus[0].name.lower().replace(" ", "-")
    known = [gpu.memory_bytes_per_s for key, gpu in GPUS.items() if key in name]
    return ACHIEVED_BANDWIDTH * (known[0] if known else 1.5e12)
