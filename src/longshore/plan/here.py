"""The machine that this process runs on, measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch

from longshore.plan.choice import Job
from longshore.plan.exchange import Exchange, ExchangeProbe
from longshore.plan.machine import LATENCY_S, Compute, MeasuredCompute, PlanMachine
from longshore.plan.overheads import Overheads, OverheadsProbe
from longshore.plan.probe import Clock, Note, Probe, merged
from longshore.plan.together import Together
from longshore.report import Figures, Machine, measure, read_machine

_FEWEST_TOKENS, _MOST_TOKENS = 32, 4096
_MEETING_S = 600e-6
"""Of two ranks that have computed a millisecond each and meet over gloo, on two cores of an Intel Xeon: 590 to 660 us
on average, most of it waiting for the other one; 180 us where they do nothing else."""
_DEVICES_EXCHANGE_SHARE = 1 / 8
"""Of the speed of a copy in host memory, between devices: nothing is measured there."""


class MachineProbe:
    """Everything that is measured of this machine, made once; a context manager, which ends its threads.

    Args:
        dtype: of parameters.
        tokens: of a backward, at least two numbers of them.
        seq_len: the most tokens that attend to each other.
        ranks: on this host; they share it where there is no CUDA device for each.
        numel: elements that are stepped and copied.
        threads: of the host, of all ranks together; None: one for each CPU that the process may use.
        clock: seconds; on a busy machine with one thread, ``time.process_time``.

    Raises:
        ValueError: fewer than two numbers of tokens.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        tokens: Sequence[int],
        seq_len: int,
        ranks: int,
        numel: int = 1 << 26,
        threads: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._machine = read_machine()
        self._ranks, self._numel, self._threads, self._clock = ranks, numel, threads, clock
        devices = bool(self._machine.gpus)
        sharing = 1 if devices else ranks
        self._together = Together(sharing, threads)
        device = torch.device("cuda" if devices else "cpu")
        self._probes = [Probe(dtype, tokens, seq_len, device, clock) for _ in range(self._together.count)]
        self._exchange = ExchangeProbe(dtype, sharing, numel, self._together, clock) if sharing > 1 else None
        # Several ranks reduce in float32.
        gradient_dtype = dtype if ranks == 1 else torch.float32
        self._overheads = OverheadsProbe(dtype, gradient_dtype, numel // 2, threads, clock)
        self._compute(1, lambda line: None)  # not counted

    def measure(self, rounds: int, note: Note = lambda line: None) -> PlanMachine:
        """Medians of so many rounds; ``note`` is told what is measured now."""
        figures = measure(self._numel, rounds, note, self._threads, self._clock)
        note("what a parameter takes")
        overheads = self._overheads.measure(rounds)
        exchange = None
        if self._exchange is not None:
            note("what ranks exchange")
            exchange = self._exchange.measure(rounds)
        compute = self._compute(rounds, note)
        return of_figures(self._machine, figures, overheads, compute, self._ranks, exchange)

    def _compute(self, rounds: int, note: Note) -> MeasuredCompute:
        found = [self._together.run(lambda rank: self._probes[rank].measure(note)) for _ in range(rounds)]
        of_ranks = [merged(each, statistics.median) for each in zip(*found, strict=True)]
        return merged(of_ranks, max, self._together.turns)

    def close(self) -> None:
        self._overheads.close()
        self._together.close()

    def __enter__(self) -> MachineProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def this_machine(
    job: Job,
    ranks: int | None = None,
    numel: int = 1 << 26,
    rounds: int = 3,
    note: Note = lambda line: None,
) -> PlanMachine:
    """Measure it; some ten or twenty seconds.

    Args:
        job: tokens and dtype that are measured.
        ranks: on this host; None: one for each CUDA device, or one.
        numel: elements that are stepped and copied.
        rounds: of each figure.
        note: is told what is measured now.

    Raises:
        ValueError: more ranks than CUDA devices.
    """
    devices = len(read_machine().gpus)
    if devices and ranks is not None and ranks > devices:
        raise ValueError(
            f"this machine has {devices} CUDA devices, and {ranks} ranks need one each; give --gpu to plan for another"
        )
    dtype = job.dtype or torch.float32
    with MachineProbe(dtype, tokens_to_measure(job), job.seq_len, ranks or max(1, devices), numel) as probe:
        return probe.measure(rounds, note)


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
    """The machine of ``longshore report``, with how fast it computes; ``exchange``: between ranks without devices.

    Raises:
        ValueError: there are such ranks, and nothing says how they exchange.
    """
    gpus = machine.gpus
    limit = machine.memory.limit_bytes or machine.memory.total_bytes
    memory = min(machine.memory.available_bytes, limit)
    copied = figures.memory_copy_bytes_per_s
    assumptions = []
    if exchange is None:
        if ranks > 1 and not gpus:
            raise ValueError(f"{ranks} ranks without devices: give exchange, as ExchangeProbe measures it")
        assumed = _DEVICES_EXCHANGE_SHARE * copied
        exchange = Exchange(assumed, assumed, math.inf)
        if ranks > 1:
            assumptions.append(
                f"between devices: {assumed / 1e9:.3g} GB/s, an eighth of a copy's in host memory, "
                f"and {1e6 * LATENCY_S:.0f} us for each exchange"
            )
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
        latency_s=LATENCY_S if gpus else _MEETING_S,
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
