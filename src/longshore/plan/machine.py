"""The machine of a plan: its memory, its bandwidths, and its compute times; and machines that users describe.

Bandwidths are in bytes a second in one direction, unless a comment says otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.seam import did_you_mean


class Work(NamedTuple):
    """Work of a part of the model for each token."""

    multiplied: float  # elements of matrices that a token is multiplied by
    width: float  # numbers that go into and come out of these matrices
    logits: float
    attention: float  # heads times head size, summed over the layers of the part
    weight_bytes: int  # bytes of weights that are read, however many tokens there are
    looked_up: int = 0  # elements of embeddings, whose gradient is written as a whole


class Seconds(NamedTuple):
    """How long a part of the model takes on one rank."""

    forward: float
    backward: float  # for the gradients of inputs and weights


@dataclass(frozen=True)
class PeakCompute:
    """Times of forward and backward from a data sheet: a share of the peak, and no faster than weights are read."""

    flops: float  # operations a second that are reached
    memory_bytes_per_s: float  # of the device's own memory

    def seconds(self, work: Work, tokens: int, seq_len: int) -> Seconds:
        # A token attends to half of its sequence on average: two products, two operations each.
        operations = tokens * 2 * (work.multiplied + work.attention * seq_len)
        forward = max(operations / self.flops, work.weight_bytes / self.memory_bytes_per_s)
        written_bytes = 2 * work.looked_up  # the embedding's gradient, in bfloat16
        return Seconds(forward, 2 * forward + written_bytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class MeasuredCompute:
    """Times that were measured at some numbers of tokens, with linear interpolation between and beyond them.

    Attributes:
        tokens: two or more numbers of tokens, increasing.
        table: float64 ``[4, len(tokens), 2]``: the :class:`Seconds` of one element of a matrix, of one number of
            ``Work.width``, of one logit, and of one element of an embedding.
    """

    tokens: Sequence[int]
    table: Tensor

    def seconds(self, work: Work, tokens: int, seq_len: int) -> Seconds:
        right = min(max(bisect_right(self.tokens, tokens), 1), len(self.tokens) - 1)
        share = (tokens - self.tokens[right - 1]) / (self.tokens[right] - self.tokens[right - 1])
        of_one = torch.lerp(self.table[:, right - 1], self.table[:, right], share).clamp(min=0.0)
        counts = torch.tensor([work.multiplied, work.width, work.logits, work.looked_up], dtype=torch.float64)
        return Seconds(*(counts @ of_one).tolist())


@dataclass(frozen=True)
class PlanMachine:
    """A machine whose ranks are all alike."""

    name: str
    ranks: int
    ranks_per_host: int  # they share the host's memory, threads and bandwidth
    staged: bool  # parameters are on devices with memory of their own
    device_bytes: int  # memory of each device; 0 with parameters in host memory
    host_bytes: int  # memory of each host
    host_bytes_per_s: float  # what all threads of a host read and write together in a step
    host_norm_bytes_per_s: float  # at which all threads of a host read gradients for the norm
    to_host_bytes_per_s: float  # of each device's link
    to_device_bytes_per_s: float
    device_memory_bytes_per_s: float  # what each device reads and writes in its own memory
    exchange_bytes_per_s: float  # what each rank sends to others, while all ranks send
    latency_s: float  # of one exchange
    compute: PeakCompute | MeasuredCompute
    arrival_s: float = 0.0  # time that the arrival of each parameter's gradient adds to backward
    bookkeeping_s: float = 0.0  # time that each parameter adds to ``step()``, besides moving bytes
    reduce_bytes_per_s: float | None = None  # what is sent and also added up; None: as ``exchange_bytes_per_s``
    unshard_bytes_per_s: float = math.inf  # for stage 3's copies of gathered parameters; not counted on devices
    transform_flops: float | None = None  # operations a second of Newton-Schulz on each rank; None: not known
    host_threads: int = 0  # of each host, for all of its ranks; 0: not known
    assumptions: Sequence[str] = ()  # figures that were neither measured nor given, in words

    @property
    def threads_of_a_rank(self) -> int:
        return max(1, self.host_threads // self.ranks_per_host)


class GpuSheet(NamedTuple):
    """A GPU's data sheet: bytes, dense bfloat16 operations a second, and bytes a second."""

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the host
    peers_bytes_per_s: float  # to other GPUs of the same host
    source: str


_PCIE_4, _PCIE_5 = 32e9, 64e9
_GB = 10**9

GPUS: Mapping[str, GpuSheet] = {
    "a100-40": GpuSheet("A100 40GB SXM", 40 * _GB, 312e12, 1.555e12, _PCIE_4, 300e9, "NVIDIA A100 data sheet (2021)"),
    "a100-80": GpuSheet("A100 80GB SXM", 80 * _GB, 312e12, 2.039e12, _PCIE_4, 300e9, "NVIDIA A100 data sheet (2021)"),
    "h100": GpuSheet("H100 SXM", 80 * _GB, 989e12, 3.35e12, _PCIE_5, 450e9, "NVIDIA H100 data sheet (2023)"),
    "h200": GpuSheet("H200 SXM", 141 * _GB, 989e12, 4.8e12, _PCIE_5, 450e9, "NVIDIA H200 data sheet (2024)"),
    "b200": GpuSheet("B200", 180 * _GB, 2250e12, 7.7e12, _PCIE_5, 900e9, "NVIDIA HGX B200 data sheet (2024)"),
    "gh200": GpuSheet("GH200", 96 * _GB, 990e12, 4.0e12, 450e9, 450e9, "NVIDIA GH200 data sheet (2023)"),
    "l40s": GpuSheet("L40S", 48 * _GB, 362e12, 0.864e12, _PCIE_4, _PCIE_4, "NVIDIA L40S data sheet (2023)"),
    "rtx-4090": GpuSheet("RTX 4090", 24 * _GB, 165e12, 1.008e12, _PCIE_4, _PCIE_4, "NVIDIA Ada whitepaper (2022)"),
}
"""Data sheets by the names that ``--gpu`` takes."""
CUSTOM = "custom"
"""``--gpu custom``: a GPU that the table does not have, described by these options."""
_CUSTOM_NEEDS = {
    "--device-memory": "device_memory_bytes",
    "--flops": "flops",
    "--device-bandwidth": "device_bytes_per_s",
    "--link": "link_bytes_per_s",
}

ACHIEVED_FLOPS = 0.45
"""Share of the peak that forward and backward of large transformers reach."""
ACHIEVED_BANDWIDTH = 0.8
"""Share of a data sheet's bandwidth that is reached in practice."""
_ACHIEVED_HOST = 0.9
"""Share of a host's bandwidth that its step reaches (``make bench``: 0.87 and 0.93)."""
_HOST_BYTES_PER_S, _NETWORK_BYTES_PER_S = 200e9, 50e9
LATENCY_S = 50e-6
"""Seconds of latency of one exchange between devices."""
_BOOKKEEPING_S = 20e-6
"""Seconds of Python's work for each parameter in ``step()``, on an Intel Xeon. A device hides the work of backward's
hooks."""


class Description(NamedTuple):
    """A machine that a user describes. None stands for the value of the data sheet, or for an assumption."""

    gpu: str
    gpus: int = 1
    hosts: int = 1
    host_memory_bytes: int | None = None
    host_bytes_per_s: float | None = None
    host_threads: int | None = None
    link_bytes_per_s: float | None = None
    peers_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    device_memory_bytes: int | None = None
    device_bytes_per_s: float | None = None
    flops: float | None = None
    efficiency: float = ACHIEVED_FLOPS


def described(given: Description) -> PlanMachine:
    """Return the machine of a description.

    Raises:
        ValueError: the GPU is unknown, or a figure is out of range or missing.
    """
    for count, what in ((given.gpus, "gpus"), (given.hosts, "hosts"), (given.host_threads, "host_threads")):
        if count is not None and count < 1:
            raise ValueError(f"{what} must be at least 1, and is {count}")
    if not 0 < given.efficiency <= 1:
        raise ValueError(f"efficiency is a share of the peak, above 0 and up to 1, and is {given.efficiency:g}")
    sheet = _sheet(given)
    if given.host_memory_bytes is None:
        raise ValueError("the memory of a host is not known: give --host-memory, for example 2TB")
    peak, source = (sheet.flops, sheet.source) if given.flops is None else (given.flops, "as given")
    assumptions = [f"matrix products reach {given.efficiency:.0%} of {peak / 1e12:.4g} TFLOP/s ({source})"]

    def or_assumed(value: float | None, assumed: float, what: str) -> float:
        if value is None:
            assumptions.append(f"{what}: {assumed / 1e9:.3g} GB/s")
        return assumed if value is None else value

    link = or_assumed(given.link_bytes_per_s, ACHIEVED_BANDWIDTH * sheet.link_bytes_per_s, "link to the host")
    host = _ACHIEVED_HOST * or_assumed(given.host_bytes_per_s, _HOST_BYTES_PER_S, "bandwidth of host memory")
    exchange = given.peers_bytes_per_s or sheet.peers_bytes_per_s
    if given.gpus > 1:
        assumed = ACHIEVED_BANDWIDTH * sheet.peers_bytes_per_s
        exchange = or_assumed(given.peers_bytes_per_s, assumed, "between devices of one machine")
    if given.hosts > 1:
        network = or_assumed(given.network_bytes_per_s, _NETWORK_BYTES_PER_S, "network, each device")
        exchange = min(exchange, network)
    device_speed = ACHIEVED_BANDWIDTH * (given.device_bytes_per_s or sheet.memory_bytes_per_s)
    assumptions.append(f"step() takes {1e6 * _BOOKKEEPING_S:.0f} us for each parameter, beside moving bytes")
    ranks = given.gpus * given.hosts
    return PlanMachine(
        name=f"{ranks} x {sheet.name}" + (f" on {given.hosts} hosts" if given.hosts > 1 else ""),
        ranks=ranks,
        ranks_per_host=given.gpus,
        staged=True,
        device_bytes=given.device_memory_bytes or sheet.memory_bytes,
        host_bytes=given.host_memory_bytes,
        host_bytes_per_s=host,
        host_norm_bytes_per_s=host,
        to_host_bytes_per_s=link,
        to_device_bytes_per_s=link,
        device_memory_bytes_per_s=device_speed,
        exchange_bytes_per_s=exchange,
        latency_s=LATENCY_S,
        compute=PeakCompute(given.efficiency * peak, device_speed),
        transform_flops=given.efficiency * peak,
        bookkeeping_s=_BOOKKEEPING_S,
        host_threads=given.host_threads or 0,
        assumptions=tuple(assumptions),
    )


def _sheet(given: Description) -> GpuSheet:
    name = given.gpu.lower().replace("_", "-")
    if name == CUSTOM:
        missing = [option for option, field in _CUSTOM_NEEDS.items() if getattr(given, field) is None]
        if missing:
            raise ValueError(f"--gpu custom has no data sheet: give {', '.join(missing)} too")
        return GpuSheet("GPU", 0, 0.0, 0.0, 0.0, given.link_bytes_per_s or 0.0, "as given")
    if name not in GPUS:
        near = did_you_mean(name, [*GPUS, CUSTOM])
        raise ValueError(
            f"--gpu {given.gpu} is not in the table; {near}{'' if near.endswith('?') else '.'} With custom, give "
            f"{', '.join(_CUSTOM_NEEDS)}"
        )
    return GPUS[name]
