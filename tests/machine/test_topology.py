"""What is read of CPUs and GPUs, from files laid out as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.machine import LogicalCpu, all_gpus, cpu_list, numa_node_of, parse_cpu_list, read_topology, usable_cpus
from machine.made import lay, two_sockets_with_smt


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus(numbers: set[int]) -> None:
    assert parse_cpu_list(cpu_list(numbers)) == sorted(numbers)


def test_lists_as_linux_writes_them() -> None:
    assert parse_cpu_list("0-2,5,8-9\n") == [0, 1, 2, 5, 8, 9]
    assert cpu_list([9, 5, 0, 2, 1, 8]) == "0-2,5,8-9"
    assert [parse_cpu_list(text) for text in ("", "\n", "none", "1-x", "-3")] == [[]] * 5


def test_two_sockets_with_smt(tmp_path: Path) -> None:
    topology = read_topology(lay(tmp_path, two_sockets_with_smt(cores=2)), range(8))
    assert topology.cpus[1] == LogicalCpu(1, core=1, node=0)
    assert topology.cpus[5] == LogicalCpu(5, core=1, node=0)
    assert [cpu.node for cpu in topology.cpus] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert topology.nodes == (0, 1)
    assert not topology.narrowed and topology.quota is None


def test_the_old_name_of_the_siblings(tmp_path: Path) -> None:
    files = two_sockets_with_smt(cores=2)
    renamed = {name.replace("core_cpus_list", "thread_siblings_list"): text for name, text in files.items()}
    assert read_topology(lay(tmp_path, renamed), range(8)).cpus[5].core == 1


def test_a_cpuset_narrows_it(tmp_path: Path) -> None:
    topology = read_topology(lay(tmp_path, two_sockets_with_smt(cores=2)), [2, 6, 3])
    assert topology.narrowed and topology.nodes == (1,)
    assert [(cpu.number, cpu.core) for cpu in topology.cpus] == [(2, 2), (3, 3), (6, 2)]


def test_a_sibling_that_may_not_be_used_still_names_the_core(tmp_path: Path) -> None:
    topology = read_topology(lay(tmp_path, two_sockets_with_smt(cores=2)), [4, 5])
    assert [cpu.core for cpu in topology.cpus] == [0, 1]


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, range(os.cpu_count() or 1))
    assert all(cpu.core == cpu.number and cpu.node is None for cpu in topology.cpus)
    assert topology.nodes == (None,) and not topology.narrowed
    if (os.cpu_count() or 1) > 1:
        assert read_topology(tmp_path, [0]).narrowed


@pytest.mark.parametrize("path", ["sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us"])
def test_a_quota(path: str, tmp_path: Path) -> None:
    files = {path: "150000 100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    files[path] = files[path] if path.endswith("max") else "150000\n"
    assert read_topology(lay(tmp_path, files), [0]).quota == 1.5


def test_this_machine() -> None:
    topology = read_topology()
    assert [cpu.number for cpu in topology.cpus] == usable_cpus()


def test_gpus(tmp_path: Path) -> None:
    def device(vendor: str, kind: str, node: str) -> dict[str, str]:
        return {"vendor": vendor + "\n", "class": kind + "\n", "numa_node": node + "\n"}

    found = {
        "0000:3b:00.0": device("0x10de", "0x030200", "1"),
        "0000:1a:00.0": device("0x10de", "0x030000", "-1"),
        "0000:1a:00.1": device("0x10de", "0x040300", "0"),  # its sound
        "0000:05:00.0": device("0x1a03", "0x030000", "0"),  # somebody else's display
    }
    files = {f"sys/bus/pci/devices/{a}/{name}": text for a, each in found.items() for name, text in each.items()}
    root = lay(tmp_path, files)
    assert all_gpus(root) == ["0000:1a:00.0", "0000:3b:00.0"]
    assert [numa_node_of(address, root) for address in (*all_gpus(root), "0000:77:00.0")] == [None, 1, None]
