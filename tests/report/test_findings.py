"""Each thing that hurts is said, and nothing where nothing does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longshore.report import Cpu, Figures, Gpu, HostMemory, Machine, Software, findings_of, largest_models, measure

GIB = 1 << 30
GOOD = Machine(
    Software("Linux", "3.12", "0.1", "2.13", "13.0", True, {}, {}, 8),
    Cpu("fast", 8, range(8), None, {0: "0-7"}, {"L3": 32 << 20}, "AVX512", "AVX512"),
    HostMemory(64 * GIB, 60 * GIB, None, None, 8 * GIB, 0, "madvise"),
    [Gpu("H", 80 * GIB, 79 * GIB, "9.0", 0, "32.0 GT/s x16", [])],
)
FAST = Figures(8, 1 << 26, 90e9, 100e9, 3e9, 80e9, [50e9], [50e9])

BAD = [
    (replace(GOOD, gpus=[], software=replace(GOOD.software, cuda=None)), FAST, "this torch is built for the CPU"),
    (replace(GOOD, gpus=[]), FAST, "finds none (CUDA_VISIBLE_DEVICES?)"),
    (GOOD, replace(FAST, to_device_bytes_per_s=[3e9]), "copies to cuda:0 run at 3.0 GB/s"),
    (replace(GOOD, cpu=replace(GOOD.cpu, instruction_set="BASELINE")), FAST, "without vector instructions"),
    (replace(GOOD, cpu=replace(GOOD.cpu, quota=2.5)), FAST, "shows 8 CPUs and grants the time of 2.5"),
    (replace(GOOD, cpu=replace(GOOD.cpu, usable=range(2))), FAST, "may use 2 of 8 CPUs"),
    (replace(GOOD, software=replace(GOOD.software, environment={"OMP_NUM_THREADS": "1"})), FAST, "OMP_NUM_THREADS=1"),
    (GOOD, replace(FAST, step_bytes_per_s=40e9), "moves 40.0 GB/s, and a copy in memory 100.0 GB/s"),
    (replace(GOOD, cpu=replace(GOOD.cpu, numa_nodes={0: "0-3", 1: "4-7"})), FAST, "2 NUMA nodes"),
    (replace(GOOD, memory=replace(GOOD.memory, swap_used_bytes=GIB)), FAST, "1.0 GiB are swapped out"),
    (replace(GOOD, memory=replace(GOOD.memory, huge_pages="never")), FAST, "huge pages are off"),
    (replace(GOOD, memory=replace(GOOD.memory, limit_bytes=16 * GIB)), FAST, "may use 16.0 GiB of 64.0 GiB"),
    (replace(GOOD, memory=replace(GOOD.memory, shared_free_bytes=64 << 20)), FAST, "/dev/shm has 64.0 MiB"),
    (replace(GOOD, memory=replace(GOOD.memory, locked_limit_bytes=8 << 20)), FAST, "may lock 8.0 MiB"),
]


@pytest.mark.parametrize(("machine", "figures", "says"), BAD, ids=[says for _, _, says in BAD])
def test_what_hurts_is_said(machine: Machine, figures: Figures, says: str) -> None:
    (found,) = findings_of(machine, figures, load=0.5)
    assert says in found.what and found.do


def test_nothing_hurts() -> None:
    assert findings_of(GOOD, FAST, load=0.5) == []
    assert findings_of(GOOD, load=0.5) == []


def test_a_busy_machine() -> None:
    (found,) = findings_of(GOOD, FAST, load=9.0)
    assert found.what.startswith("9.0 tasks were running on 8 CPUs")


def test_figures() -> None:
    said: list[str] = []
    figures = measure(1 << 20, rounds=2, note=said.append)
    assert said[:2] == ["the host step", "memory"]
    assert min(figures.memory_read_bytes_per_s, figures.memory_copy_bytes_per_s, figures.step_numel_per_s) > 1e6
    assert figures.step_bytes_per_s == pytest.approx(28 * figures.step_numel_per_s)
    assert len(figures.to_device_bytes_per_s) == len(figures.from_device_bytes_per_s)


@pytest.mark.parametrize("arguments", [{"numel": 1000}, {"rounds": 0}])
def test_figures_of_nothing(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        measure(**arguments)


def test_the_largest_models() -> None:
    """16 bytes a parameter rest on the host with streaming; without it 14 there and 2 on the device."""
    host = GOOD.memory.available_bytes
    assert largest_models(replace(GOOD, gpus=[])) == {"here": int(0.95 * host) // 16}
    assert largest_models(GOOD) == {"offloaded": int(0.95 * host) // 14, "streamed": int(0.95 * host) // 16}
    small = replace(GOOD.gpus[0], free_bytes=4 * GIB)
    on_small = largest_models(replace(GOOD, gpus=[small, small]))
    assert on_small == {"offloaded": int(0.75 * 4 * GIB) // 2, "streamed": int(0.95 * host) // 16}
    limited = replace(GOOD, memory=replace(GOOD.memory, limit_bytes=16 * GIB))
    assert largest_models(limited)["streamed"] == int(0.95 * 16 * GIB) // 16
