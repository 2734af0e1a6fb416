"""A machine as a plan sees it: memory, bandwidths, and how long what is computed takes.

Bandwidths are of bytes in one direction a second unless they say otherwise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What a part of the model asks for, each token."""

    multiplied: float
    """Elements that it is multiplied by."""
    width: float
    """Numbers in and out of its matrices."""
    logits: float
    """Numbers that the loss is made of."""
    attention: float
    """Heads times their size, over its layers."""
    weight_bytes: int
    """That are read, however many tokens there are."""
    looked_up: int = 0
    """Elements of embeddings, whose gradient is written as a whole."""


class Compute(ABC):
    """How long forward and backward of a part of the model take on one rank, in seconds."""

    @abstractmethod
    def forward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        """Forward, over so many tokens in sequences of ``seq_len``."""

    @abstractmethod
    def backward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        """Backward, which gives the gradients of inputs and weights."""

    @abstractmethod
    def release_s(self, work: Work, tokens: int) -> float:
        """Giving back the memory of the weights' gradients."""


_LOOKED_UP_BYTES = 2


@dataclass(frozen=True)
class PeakCompute(Compute):
    """From a data sheet: operations at a share of the peak, and no faster than weights are read.

    Attributes:
        flops: operations a second that are reached.
        memory_bytes_per_s: of the device's own memory.
    """

    flops: float
    memory_bytes_per_s: float

    def forward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        # A token attends to half of its sequence on average: two products, two operations each.
        operations = tokens * (2 * (work.multiplied) + 2 * work.attention * seq_len)
        return max(operations / self.flops, work.weight_bytes / self.memory_bytes_per_s)

    def backward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        written = work.looked_up * _LOOKED_UP_BYTES / self.memory_bytes_per_s
        return 2 * self.forward_s(work, tokens, seq_len) + written

    def release_s(self, work: Work, tokens: int) -> float:
        return 0.0  # to a pool of the process's own


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens: measured points, and straight lines between and beyond them."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        place = min(max(bisect_right(self.tokens, tokens), 1), len(self.tokens) - 1)
        (left, right), (low, high) = self.tokens[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, low + (high - low) * (tokens - left) / (right - left))


@dataclass(frozen=True)
class MeasuredCompute(Compute):
    """From what this machine did (:mod:`longshore.plan.probe`); each curve is of one number that a token meets.

    Attributes:
        forward, backward, release: by ``"matrix"`` (an element that tokens are multiplied by), ``"width"`` (a number
            that goes in or out), ``"logit"`` and ``"lookup"`` (an element of an embedding).
    """

    forward: Mapping[str, Curve]
    backward: Mapping[str, Curve]
    release: Mapping[str, Curve]

    def forward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        return _sum(self.forward, work, tokens)

    def backward_s(self, work: Work, tokens: int, seq_len: int) -> float:
        return _sum(self.backward, work, tokens)

    def release_s(self, work: Work, tokens: int) -> float:
        return _sum(self.release, work, tokens)


def _sum(curves: Mapping[str, Curve], work: Work, tokens: int) -> float:
    counts = {"matrix": work.multiplied, "width": work.width, "logit": work.logits, "lookup": work.looked_up}
    return sum(count * curves[name].at(tokens) for name, count in counts.items() if count)


@dataclass(frozen=True)
class PlanMachine:
    """All ranks are alike.

    Attributes:
        name: for titles.
        ranks: of the whole run.
        ranks_per_host: that share one host's memory, threads and their bandwidth.
        staged: parameters are on devices with memory of their own.
        device_bytes: of each device; with parameters in host memory 0.
        host_bytes: of each host.
        host_bytes_per_s: that all host threads read and write in a step, on one host.
        host_norm_bytes_per_s: of gradients whose norm they measure, on one host.
        to_host_bytes_per_s, to_device_bytes_per_s: of each device's link.
        device_memory_bytes_per_s: of each device, read and written.
        exchange_bytes_per_s: that each rank sends to others, while all do.
        latency_s: of one exchange.
        reduce_bytes_per_s: as ``exchange_bytes_per_s``, where they are also added up; None: as fast.
        unshard_bytes_per_s: that stage 3 copies to where they are used; a device's memory is too fast to count.
        compute: how long forward and backward take.
        arrival_s: of each parameter, that backward waits for when its gradient comes.
        bookkeeping_s: of each parameter, that ``step()`` takes beside what moves bytes.
        assumptions: what was not measured or said, in words.
    """

    name: str
    ranks: int
    ranks_per_host: int
    staged: bool
    device_bytes: int
    host_bytes: int
    host_bytes_per_s: float
    host_norm_bytes_per_s: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    device_memory_bytes_per_s: float
    exchange_bytes_per_s: float
    latency_s: float
    compute: Compute
    arrival_s: float = 0.0
    bookkeeping_s: float = 0.0
    reduce_bytes_per_s: float | None = None
    unshard_bytes_per_s: float = math.inf
    assumptions: Sequence[str] = ()


class Gpu(NamedTuple):
    """Figures of a data sheet: bytes, operations a second (bfloat16, dense), and bytes a second."""

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the host, in one direction."""
    peers_bytes_per_s: float
    """To other devices of its machine, in one direction."""
    source: str


_PCIE_4, _PCIE_5 = 32e9, 64e9
_GB = 10**9

GPUS: Mapping[str, Gpu] = {
    "a100-40": Gpu("A100 40GB SXM", 40 * _GB, 312e12, 1.555e12, _PCIE_4, 300e9, "NVIDIA A100 data sheet (2021)"),
    "a100-80": Gpu("A100 80GB SXM", 80 * _GB, 312e12, 2.039e12, _PCIE_4, 300e9, "NVIDIA A100 data sheet (2021)"),
    "h100": Gpu("H100 SXM", 80 * _GB, 989e12, 3.35e12, _PCIE_5, 450e9, "NVIDIA H100 data sheet (2023)"),
    "h200": Gpu("H200 SXM", 141 * _GB, 989e12, 4.8e12, _PCIE_5, 450e9, "NVIDIA H200 data sheet (2024)"),
    "b200": Gpu("B200", 180 * _GB, 2250e12, 7.7e12, _PCIE_5, 900e9, "NVIDIA HGX B200 data sheet (2024)"),
    "gh200": Gpu("GH200", 96 * _GB, 990e12, 4.0e12, 450e9, 450e9, "NVIDIA GH200 data sheet (2023)"),
    "l40s": Gpu("L40S", 48 * _GB, 362e12, 0.864e12, _PCIE_4, _PCIE_4, "NVIDIA L40S data sheet (2023)"),
    "rtx-4090": Gpu("RTX 4090", 24 * _GB, 165e12, 1.008e12, _PCIE_4, _PCIE_4, "NVIDIA Ada whitepaper (2022)"),
}
"""By the names that ``--gpu`` takes."""

ACHIEVED_FLOPS = 0.45
"""Of the peak, in forward and backward of large transformers."""
ACHIEVED_BANDWIDTH = 0.8
"""Of a data sheet's bandwidth."""
HOST_SHARE = 0.9
"""Of a host's bandwidth that its step reaches (``make bench``: 0.87 and 0.93)."""
_NETWORK_BYTES_PER_S = 50e9
LATENCY_S = 50e-6
"""Of one exchange between devices."""
_BOOKKEEPING_S = 20e-6
"""Python's work for each parameter in ``step()``, on an Intel Xeon; what backward's hooks take, a device hides."""


class Description(NamedTuple):
    """What somebody says of a machine that is not here; None: the data sheet, or what is assumed."""

    gpu: str
    gpus: int = 1
    hosts: int = 1
    host_memory_bytes: int | None = None
    host_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    peers_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    device_memory_bytes: int | None = None
    device_bytes_per_s: float | None = None
    flops: float | None = None
    efficiency: float = ACHIEVED_FLOPS


CUSTOM = "custom"
"""A GPU that the table does not have."""


def described(said: Description) -> PlanMachine:
    """The machine that somebody describes.

    Raises:
        ValueError: an unknown GPU, with the nearest known one, or figures that are missing.
    """
    sheet = _sheet(said)
    if not 0 < said.efficiency <= 1:
        raise ValueError(f"efficiency is a share of the peak from 0 to 1, not {said.efficiency:g}")
    peak, source = (sheet.flops, sheet.source) if said.flops is None else (said.flops, "as given")
    assumptions = [f"matrix products reach {said.efficiency:.0%} of {peak / 1e12:.4g} TFLOP/s ({source})"]

    def given(value: float | None, otherwise: float, what: str) -> float:
        if value is not None:
            return value
        assumptions.append(f"{what}: {otherwise / 1e9:.3g} GB/s")
        return otherwise

    link = given(said.link_bytes_per_s, ACHIEVED_BANDWIDTH * sheet.link_bytes_per_s, "link to the host")
    host = given(said.host_bytes_per_s, 200e9, "bandwidth of host memory")
    peers = said.peers_bytes_per_s
    if said.gpus > 1:
        peers = given(peers, ACHIEVED_BANDWIDTH * sheet.peers_bytes_per_s, "between devices of one machine")
    exchange = peers or sheet.peers_bytes_per_s
    if said.hosts > 1:
        network = given(said.network_bytes_per_s, _NETWORK_BYTES_PER_S, "network, each device")
        exchange = min(exchange, network)
    memory = said.host_memory_bytes
    if memory is None:
        raise ValueError("how much memory does a host have? give --host-memory, as 2TB")
    device_speed = ACHIEVED_BANDWIDTH * (said.device_bytes_per_s or sheet.memory_bytes_per_s)
    assumptions.append(f"step() takes {1e6 * _BOOKKEEPING_S:.0f} us for each parameter, beside what moves bytes")
    ranks = said.gpus * said.hosts
    return PlanMachine(
        name=f"{ranks} x {sheet.name}" + (f" on {said.hosts} hosts" if said.hosts > 1 else ""),
        ranks=ranks,
        ranks_per_host=said.gpus,
        staged=True,
        device_bytes=said.device_memory_bytes or sheet.memory_bytes,
        host_bytes=memory,
        host_bytes_per_s=HOST_SHARE * host,
        host_norm_bytes_per_s=HOST_SHARE * host,
        to_host_bytes_per_s=link,
        to_device_bytes_per_s=link,
        device_memory_bytes_per_s=device_speed,
        exchange_bytes_per_s=exchange,
        latency_s=LATENCY_S,
        compute=PeakCompute(said.efficiency * peak, device_speed),
        bookkeeping_s=_BOOKKEEPING_S,
        assumptions=tuple(assumptions),
    )


def _sheet(said: Description) -> Gpu:
    from longshore.engine.wording import did_you_mean

    name = said.gpu.lower().replace("_", "-")
    for count, what in ((said.gpus, "gpus"), (said.hosts, "hosts")):
        if count < 1:
            raise ValueError(f"{what} is a number from 1 on, not {count}")
    if name == CUSTOM:
        missing = [
            option
            for option, value in (
                ("--device-memory", said.device_memory_bytes),
                ("--flops", said.flops),
                ("--device-bandwidth", said.device_bytes_per_s),
                ("--link", said.link_bytes_per_s),
            )
            if value is None
        ]
        if missing:
            raise ValueError(f"--gpu custom needs its figures: give {', '.join(missing)} too")
        assert said.device_memory_bytes and said.flops and said.device_bytes_per_s and said.link_bytes_per_s
        return Gpu(
            "GPU",
            said.device_memory_bytes,
            said.flops,
            said.device_bytes_per_s,
            said.link_bytes_per_s,
            said.peers_bytes_per_s or said.link_bytes_per_s,
            "as given",
        )
    if name not in GPUS:
        near = did_you_mean(name, [*GPUS, CUSTOM])
        raise ValueError(
            f"--gpu {said.gpu} is not in the table; {near}{'' if near.endswith('?') else '.'} With custom give "
            "--device-memory, --flops, --device-bandwidth and --link"
        )
    return GPUS[name]
