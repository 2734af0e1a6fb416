"""Which CPUs of its machine a rank's host threads run on."""

from __future__ import annotations

from typing import NamedTuple

from longshore.engine.config import Config
from longshore.engine.same_setup import Neighbours
from longshore.kernels import usable_cpus


class HostCpus(NamedTuple):
    """``threads`` and ``cpu_set`` of :class:`longshore.Offload`."""

    threads: int | None
    cpu_set: tuple[int, ...] | None


def host_cpus(config: Config, neighbours: Neighbours, granted: int | None = None) -> HostCpus:
    """What the configuration says; where it says nothing, the threads that were ``granted`` when this rank was bound;
    where it was not, ranks that may use the same CPUs share them."""
    if config.threads is not None or config.cpu_set is not None:
        return HostCpus(config.threads, config.cpu_set)
    cpus = usable_cpus()
    if config.cpu_share is None and granted is not None:
        return HostCpus(granted, None)
    if config.cpu_share is None:
        return HostCpus(max(1, len(cpus) // neighbours.on_cpus), None)
    # More ranks than CPUs: some share one.
    first = neighbours.place * len(cpus) // neighbours.on_cpus
    end = max(first + 1, (neighbours.place + 1) * len(cpus) // neighbours.on_cpus)
    count = max(1, round(config.cpu_share * (end - first)))
    return HostCpus(count, tuple(cpus[end - count : end]))
