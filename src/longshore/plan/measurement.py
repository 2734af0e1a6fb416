"""Measure the machine that this process runs on.

Forward and backward are timed on small parts of a Llama with random numbers; no weights of the planned model are made.
Ranks without devices are timed as threads that run at once.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longshore.plan.job import Job
from longshore.plan.machine import ACHIEVED_BANDWIDTH, GPUS, LATENCY_S, MeasuredCompute, PlanMachine
from longshore.plan.matrices import newton_schulz_operations
from longshore.report import Figures, Machine, measure, read_machine
from longshore.seam import (
    SLICE_NUMEL,
    HostKernels,
    MuonConfig,
    add_up,
    available_bytes,
    newton_schulz,
    slices,
    usable_cpus,
)

Note = Callable[[str], None]

_FEWEST_TOKENS, _MOST_TOKENS = 32, 4096
_HIDDEN, _INNER, _HEAD_SIZE, _VOCABULARY = 768, 2432, 64, 16000
_MATRICES = 20  # more bytes than caches store, as in a model
_FEW_MATRICES, _MANY_TOKENS = 4, 512  # with so many tokens, it does not matter where the weights are
_TRANSFORMED, _TRANSFORMED_ON_DEVICE = (768, 2432), (4096, 8192)
"""Rows and columns of the matrix on which Newton-Schulz is measured."""
_TRANSFORM_STEPS, _COEFFICIENTS = 2, (3.4445, -4.7750, 2.0315)
_ARRIVAL_S, _BOOKKEEPING_S = 40e-6, 50e-6
"""Seconds of Python for each parameter in backward and in ``step()``, on an Intel Xeon (family 6, model 167)."""
_MEETING_S = 600e-6
"""How long two ranks take to meet over gloo after a millisecond of computing: on two cores of an Intel Xeon 590 to
660 us on average, most of it waiting for the other rank; 180 us if they do nothing else."""
_DEVICES_EXCHANGE_SHARE = 1 / 8
"""Assumed bandwidth between devices, as a share of a copy's in host memory."""
_DEVICE_BYTES_PER_S = 1.5e12
"""Assumed bandwidth of a GPU that :data:`~longshore.plan.machine.GPUS` does not have."""


class RankThreads:
    """Threads that stand for the ranks of a host, which share its CPUs and the bandwidth of its memory.

    ``threads`` is the number of threads of all ranks together; None: one for each CPU that the process may use. At
    most 8 ranks run at once (``count``), one for each CPU and one for each 2 GiB of available memory; more ranks take
    ``turns = ranks / count`` times as long.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        threads = threads or len(usable_cpus())
        self.count = max(1, min(ranks, threads, available_bytes() >> 31, 8))
        self.turns = ranks / self.count
        self._threads_each = threads // self.count if ranks > 1 else torch.get_num_threads()
        # The threads are kept, since torch starts threads of its own for each of them.
        self._pool = ThreadPoolExecutor(self.count) if self.count > 1 else None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call ``work`` with each number below ``count``, all at once; torch divides its threads among them."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads_each)
        try:
            # A single rank runs on the calling thread, where Ctrl-C ends it.
            return [work(0)] if self._pool is None else list(self._pool.map(work, range(self.count)))
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class MachineProbe:
    """Measures this machine."""

    dtype: torch.dtype  # of parameters
    tokens: Sequence[int]  # two or more numbers of tokens in a backward
    seq_len: int  # most tokens that attend to each other
    ranks: int = 1  # on this host; without a CUDA device for each, they share its CPUs
    numel: int = 1 << 26  # elements that are stepped, copied and exchanged: more than caches store
    threads: int | None = None  # of the host, for all ranks together; None: one for each CPU of the process
    clock: Callable[[], float] = time.perf_counter  # ``time.process_time`` suits one thread on a busy machine
    transforms: bool = False  # whether to measure Newton-Schulz

    def measure(self, rounds: int, note: Note = lambda line: None) -> PlanMachine:
        """Measure the machine; figures are medians over the rounds. ``note`` is called with the next one's name.

        Raises:
            ValueError: fewer than two numbers of tokens.
        """
        machine = read_machine()
        figures = measure(self.numel, rounds, note, self.threads, self.clock)
        measured = {"host_norm_bytes_per_s": self.norm_bytes_per_s(rounds)}
        sharing = 1 if machine.gpus else self.ranks
        with closing(RankThreads(sharing, self.threads)) as threads:
            if sharing > 1:
                note("exchanges between ranks")
                measured |= self.exchange(threads, rounds)
            note("forward and backward")
            device = torch.device("cuda" if machine.gpus else "cpu")
            compute = self.compute(threads, rounds, device)
            if self.transforms:
                note("Newton-Schulz")
                measured["transform_flops"] = self.transform_flops(threads, rounds, device)
        return of_figures(machine, figures, measured, compute, self.ranks)

    def compute(self, threads: RankThreads, rounds: int, device: torch.device) -> MeasuredCompute:
        """Measure times of forward and backward, for the slowest rank."""
        points = sorted(set(self.tokens))
        if len(points) < 2:
            raise ValueError(f"give two numbers of tokens or more to measure at, not {list(self.tokens)}")

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype).requires_grad_()

        parts = [
            [[part(made, count, min(count, self.seq_len)) for count in points] for part in _PARTS]
            for _ in range(threads.count)
        ]

        def run(rank: int) -> list[list[list[float]]]:
            return [[_seconds(part, lambda: self._now(device)) for part in row] for row in parts[rank]]

        return MeasuredCompute(points, _medians(threads, run, rounds))

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()

    def transform_flops(self, threads: RankThreads, rounds: int, device: torch.device) -> float:
        """Measure Newton-Schulz on one matrix: the operations a second of the slowest rank."""
        rows, columns = _TRANSFORMED if device.type == "cpu" else _TRANSFORMED_ON_DEVICE
        matrices = [torch.randn(rows, columns, device=device).bfloat16() for _ in range(threads.count)]

        def run(rank: int) -> list[float]:
            begin = self._now(device)
            newton_schulz(matrices[rank], _COEFFICIENTS, _TRANSFORM_STEPS, 1e-7)
            return [self._now(device) - begin]

        return newton_schulz_operations(rows, columns, _TRANSFORM_STEPS) / _medians(threads, run, rounds).item()

    def exchange(self, threads: RankThreads, rounds: int) -> dict[str, float]:
        """Measure bandwidths between ranks without devices, by the names of
        :class:`~longshore.plan.machine.PlanMachine`."""
        ranks = self.ranks
        shard = max(1, self.numel // threads.count // ranks)
        gradients = [torch.full((ranks, shard), 1e-3, dtype=self.dtype) for _ in range(threads.count)]
        # What each rank sends in a slice, and the shard that it publishes.
        sent = [torch.zeros(ranks, max(1, min(shard, SLICE_NUMEL // ranks)), dtype=self.dtype) for _ in range(ranks)]
        published = [torch.zeros(shard, dtype=self.dtype) for _ in range(ranks)]

        def reduce(rank: int) -> None:
            mean = _newly_allocated(shard, torch.float32)
            for start, numel in slices(shard, ranks, SLICE_NUMEL):
                sent[rank][:, :numel].copy_(gradients[rank][:, start : start + numel])
                add_up(mean[start : start + numel], [each[rank, :numel] for each in sent], 1.0 / ranks)

        def gather(rank: int) -> None:
            published[rank].copy_(gradients[rank][rank])
            for other in range(ranks):
                if other != rank:
                    gradients[rank][other].copy_(published[other])

        def unshard(rank: int) -> None:
            _newly_allocated(ranks * shard, self.dtype).copy_(gradients[rank].view(-1))

        def run(rank: int) -> list[float]:
            times = [self.clock()]
            for work in (reduce, gather, unshard):
                work(rank)
                times.append(self.clock())
            return [end - begin for begin, end in pairwise(times)]

        seconds = _medians(threads, run, rounds).tolist()
        whole = gradients[0].nbytes
        sent_bytes = whole * (ranks - 1) / ranks
        return {
            "reduce_bytes_per_s": sent_bytes / seconds[0],
            "exchange_bytes_per_s": sent_bytes / seconds[1],
            "unshard_bytes_per_s": whole / seconds[2],
        }

    def norm_bytes_per_s(self, rounds: int) -> float:
        """Measure the speed at which all threads of the host compute the norm of gradients, in bytes a second."""
        kernels = HostKernels(self.threads)
        # Several ranks reduce in float32.
        gradient = torch.full((self.numel // 2,), 1e-3, dtype=self.dtype if self.ranks == 1 else torch.float32)

        def run(_: int) -> list[float]:
            begin = self.clock()
            kernels.block_sums([[gradient]])
            return [self.clock() - begin]

        return gradient.nbytes / _medians(RankThreads(1), run, rounds).item()


def _medians(threads: RankThreads, run: Callable[[int], object], rounds: int) -> Tensor:
    """Return the slowest rank's medians over ``rounds`` runs on all ranks, after one run that is slower."""
    found = torch.tensor([threads.run(run) for _ in range(1 + rounds)], dtype=torch.float64)
    return threads.turns * found[1:].amax(1).quantile(0.5, dim=0)


class _TimedPart(NamedTuple):
    """A part of a model that is timed."""

    forward: Callable[[], list[Tensor]]
    inputs: Sequence[Tensor]  # their gradients are freed in backward, as in a model
    weights: Sequence[Tensor]  # their gradients are freed at the end of a step
    numel: int  # times are divided by it; see MeasuredCompute


def _seconds(part: _TimedPart, now: Callable[[], float]) -> list[float]:
    """Return the times of forward and backward."""
    begin = now()
    outputs = part.forward()
    middle = now()
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    for each in part.inputs:
        each.grad = None  # freeing memory takes time too
    end = now()
    for each in part.weights:
        each.grad = None
    return [(middle - begin) / part.numel, (end - middle) / part.numel]


_Make = Callable[..., Tensor]


def _matrices(made: _Make, tokens: int, seq_len: int) -> _TimedPart:
    weights = [made(_INNER, _HIDDEN) for _ in range(_MATRICES if tokens < _MANY_TOKENS else _FEW_MATRICES)]
    x = made(tokens, _HIDDEN)
    numel = len(weights) * _INNER * _HIDDEN
    return _TimedPart(lambda: [functional.linear(x, weight) for weight in weights], [x], weights, numel)


def _between(made: _Make, tokens: int, seq_len: int) -> _TimedPart:
    """Return norms, rotary embeddings, attention, activation and sums of one block, without its seven matrices."""
    batch = max(1, tokens // seq_len)
    x, q, k, v = (made(batch, seq_len, _HIDDEN) for _ in range(4))
    gate, up = (made(batch, seq_len, _INNER) for _ in range(2))
    scale, angle = made(_HIDDEN).detach(), made(seq_len, _HEAD_SIZE).detach()

    def norm(values: Tensor) -> Tensor:
        wide = values.float()
        return scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(values.dtype)

    def heads(values: Tensor) -> Tensor:
        return values.view(batch, seq_len, -1, _HEAD_SIZE).transpose(1, 2)

    def rotated(values: Tensor) -> Tensor:
        first, second = values.chunk(2, -1)
        return values * angle + torch.cat((-second, first), -1) * angle

    def forward() -> list[Tensor]:
        normed = norm(x)
        mixed = functional.scaled_dot_product_attention(rotated(heads(q)), rotated(heads(k)), heads(v), is_causal=True)
        middle = x + mixed.transpose(1, 2).reshape(x.shape)
        return [normed, functional.silu(gate) * up, middle + norm(middle)]

    return _TimedPart(forward, [x, q, k, v, gate, up], [], 11 * _HIDDEN + 3 * _INNER)


def _loss(made: _Make, tokens: int, seq_len: int) -> _TimedPart:
    logits = made(tokens, _VOCABULARY)
    labels = torch.zeros(tokens, dtype=torch.int64, device=logits.device)
    return _TimedPart(lambda: [functional.cross_entropy(logits.float(), labels)], [logits], [], _VOCABULARY)


def _lookup(made: _Make, tokens: int, seq_len: int) -> _TimedPart:
    weight = made(_VOCABULARY, _HIDDEN)
    rows = torch.arange(tokens, device=weight.device) % _VOCABULARY
    return _TimedPart(lambda: [functional.embedding(rows, weight)], [], [weight], weight.numel())


_PARTS = (_matrices, _between, _loss, _lookup)


def _newly_allocated(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory from the system, as in a real step; memory from malloc may by chance have been used before."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE), dtype=dtype)


def this_machine(
    job: Job, ranks: int | None = None, numel: int = 1 << 26, rounds: int = 3, note: Note = lambda line: None
) -> PlanMachine:
    """Measure this machine for a job, in about ten seconds; the arguments are those of :class:`MachineProbe`.

    Raises:
        ValueError: more ranks than CUDA devices.
    """
    devices = len(read_machine().gpus)
    if devices and ranks is not None and ranks > devices:
        raise ValueError(
            f"this machine has {devices} CUDA devices, and {ranks} ranks need one each; give --gpu to plan for another"
        )
    dtype = job.dtype or torch.float32
    transforms = isinstance(job.optimizer_config, MuonConfig)
    probe = MachineProbe(
        dtype, tokens_to_measure(job), job.seq_len, ranks or max(1, devices), numel, transforms=transforms
    )
    return probe.measure(rounds, note)


def tokens_to_measure(job: Job) -> Sequence[int]:
    """Return the numbers of tokens to measure: the job's own, a few, and many, but not so many that it takes long."""
    own = min(job.tokens, _MOST_TOKENS)
    return sorted({_FEWEST_TOKENS, own, min(_MOST_TOKENS, max(2 * own, 512))})


def of_figures(
    machine: Machine, figures: Figures, measured: Mapping[str, float], compute: MeasuredCompute, ranks: int
) -> PlanMachine:
    """Return the machine with these figures; ``measured`` are further fields, as :class:`MachineProbe` returns them.

    Raises:
        ValueError: there are several ranks without devices, and nothing was measured between them.
    """
    gpus, copied = machine.gpus, figures.memory_copy_bytes_per_s
    measured = {"arrival_s": _ARRIVAL_S, "bookkeeping_s": _BOOKKEEPING_S, **measured}
    assumptions = [f"step() takes {1e6 * _BOOKKEEPING_S:.0f} us for each parameter, beside moving bytes"]
    if "exchange_bytes_per_s" not in measured:
        if ranks > 1 and not gpus:
            raise ValueError(f"{ranks} ranks without devices: measure what they exchange, with MachineProbe.exchange")
        exchange = measured["exchange_bytes_per_s"] = _DEVICES_EXCHANGE_SHARE * copied
        if ranks > 1:
            assumptions.append(
                f"between devices: {exchange / 1e9:.3g} GB/s, an eighth of a copy's in host memory, "
                f"and {1e6 * LATENCY_S:.0f} us for each exchange"
            )
    if gpus:
        assumptions.append("device memory is as fast as its data sheet says, or 1.5 TB/s")
        measured["arrival_s"] = 0.0  # devices compute meanwhile
    return PlanMachine(
        name=f"this machine, {ranks} x {gpus[0].name}" if gpus else f"this machine, {machine.cpu.name}, ranks: {ranks}",
        ranks=ranks,
        ranks_per_host=ranks,
        staged=bool(gpus),
        device_bytes=min((gpu.free_bytes for gpu in gpus), default=0),
        host_bytes=min(machine.memory.available_bytes, machine.memory.limit_bytes or machine.memory.total_bytes),
        host_bytes_per_s=figures.step_bytes_per_s,
        to_host_bytes_per_s=min(figures.from_device_bytes_per_s, default=copied),
        to_device_bytes_per_s=min(figures.to_device_bytes_per_s, default=copied),
        device_memory_bytes_per_s=_device_speed(gpus[0].name) if gpus else copied,
        latency_s=LATENCY_S if gpus else _MEETING_S,
        compute=compute,
        host_threads=figures.threads,
        assumptions=tuple(assumptions),
        **measured,
    )


def _device_speed(gpu: str) -> float:
    name = gpu.lower().replace(" ", "-")
    known = (sheet.memory_bytes_per_s for key, sheet in GPUS.items() if key in name)
    return ACHIEVED_BANDWIDTH * next(known, _DEVICE_BYTES_PER_S)
