"""What is read of a machine, from files laid out as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longshore.kernels import usable_cpus
from longshore.machine import pci_address
from longshore.report import read_machine

FILES = {
    "proc/cpuinfo": "processor : 0\nmodel name\t: A Fast One @ 3 GHz\nmodel name : another\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
    "sys/devices/system/node/node1/cpulist": "8-15\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/cpu/cpu0/cache/index0/type": "Data\n",
    "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n",
    "sys/devices/system/cpu/cpu0/cache/index1/type": "Instruction\n",
    "sys/devices/system/cpu/cpu0/cache/index1/level": "1\n",
    "sys/devices/system/cpu/cpu0/cache/index1/size": "32K\n",
    "sys/devices/system/cpu/cpu0/cache/index3/type": "Unified\n",
    "sys/devices/system/cpu/cpu0/cache/index3/level": "3\n",
    "sys/devices/system/cpu/cpu0/cache/index3/size": "32M\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/memory.max": "512000\n",
    "dev/shm/x": "",
    "dev/nvidia0": "",
}


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = read_machine(lay(tmp_path, FILES))
    assert machine.cpu.name == "A Fast One @ 3 GHz"
    assert machine.cpu.caches == {"L1d": 48 << 10, "L3": 32 << 20}
    assert dict(machine.cpu.numa_nodes) == {0: "0-7", 1: "8-15"} and list(machine.cpu.numa_nodes) == [0, 1]
    assert machine.cpu.quota == 1.5
    assert machine.cpu.usable == usable_cpus()
    memory = machine.memory
    assert (memory.total_bytes, memory.available_bytes, memory.swap_used_bytes) == (1000 << 10, 600 << 10, 30 << 10)
    assert (memory.limit_bytes, memory.huge_pages) == (512000, "madvise")
    assert memory.shared_free_bytes is not None
    assert machine.software.torch == torch.__version__
    assert machine.software.driver_sees_gpus
    assert machine.software.environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("limit", ["max 100000", "", "-1", "garbage"])
def test_no_quota(limit: str, tmp_path: Path) -> None:
    assert read_machine(lay(tmp_path, {"sys/fs/cgroup/cpu.max": limit})).cpu.quota is None


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    machine = read_machine(lay(tmp_path, files))
    assert machine.cpu.quota == 2.0
    assert machine.memory.limit_bytes is None


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.cpu.name
    assert not machine.cpu.caches and not machine.cpu.numa_nodes
    assert machine.memory.huge_pages is None and machine.memory.shared_free_bytes is None
    assert machine.memory.available_bytes > 0
    assert not machine.software.driver_sees_gpus


def test_the_address_of_a_device() -> None:
    class About:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0xAB, 3

    assert pci_address(About()) == "0000:ab:03.0"
    assert pci_address(object()) is None, "not that of another device"
