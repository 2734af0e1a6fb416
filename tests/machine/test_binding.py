"""Who gets which CPUs, on machines that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.machine import Topology, cpu_list
from longshore.machine.binding import RankBinding, RankDevice, binding_of, plan_ranks, unbound
from machine.made import cpu_ranks, gpus, machine


def cpus_of(bindings: tuple[RankBinding, ...]) -> list[str]:
    return [cpu_list(binding.cpus) for binding in bindings]


def threads_of(bindings: tuple[RankBinding, ...]) -> list[tuple[int, int]]:
    return [(binding.torch_threads, binding.host_threads) for binding in bindings]


def test_one_socket() -> None:
    bindings = plan_ranks(machine(cores=8), cpu_ranks(2))
    assert cpus_of(bindings) == ["0-3", "4-7"]
    assert threads_of(bindings) == [(4, 4)] * 2
    assert bindings[1].nodes == (0,) and bindings[1].why == ("part 2 of 2",)


def test_one_rank_has_all() -> None:
    assert cpus_of(plan_ranks(machine(cores=8), cpu_ranks(1))) == ["0-7"]
    assert plan_ranks(machine(cores=8), cpu_ranks(1))[0].why == ()


def test_two_sockets_with_smt_and_gpus_on_both() -> None:
    """Siblings stay together, and threads are counted in cores."""
    bindings = plan_ranks(machine(nodes=2, cores=8, smt=2), gpus(0, 0, 1, 1))
    assert cpus_of(bindings) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert [binding.nodes for binding in bindings] == [(0,), (0,), (1,), (1,)]
    assert threads_of(bindings) == [(4, 3)] * 4
    assert bindings[2].why == ("next to cuda:2", "part 1 of 2", "one core left to the thread that feeds cuda:2")


def test_all_gpus_on_one_node() -> None:
    """The other node stays empty: memory there is further away than the CPUs there are worth."""
    bindings = plan_ranks(machine(nodes=2, cores=8), gpus(1, 1, 1, 1))
    assert cpus_of(bindings) == ["8-9", "10-11", "12-13", "14-15"]
    assert threads_of(bindings) == [(2, 2)] * 4  # too few to leave one


def test_gpus_crossed_with_nodes() -> None:
    assert cpus_of(plan_ranks(machine(nodes=2, cores=4), gpus(1, 0))) == ["4-7", "0-3"]


def test_cores_that_do_not_divide() -> None:
    assert cpus_of(plan_ranks(machine(cores=8), cpu_ranks(3))) == ["0-1", "2-4", "5-7"]
    assert threads_of(plan_ranks(machine(cores=8), cpu_ranks(3))) == [(2, 2), (2, 3), (2, 3)]


def test_cpu_ranks_on_two_nodes() -> None:
    assert cpus_of(plan_ranks(machine(nodes=2, cores=4), cpu_ranks(2))) == ["0-3", "4-7"]
    assert cpus_of(plan_ranks(machine(nodes=2, cores=4), cpu_ranks(3))) == ["0-1", "2-3", "4-7"]


def test_fewer_ranks_than_nodes() -> None:
    """All memory is wanted."""
    (binding,) = plan_ranks(machine(nodes=2, cores=4), cpu_ranks(1))
    assert cpu_list(binding.cpus) == "0-7" and binding.nodes == (0, 1)
    assert [each.nodes for each in plan_ranks(machine(nodes=4, cores=2), cpu_ranks(2))] == [(0, 1), (2, 3)]


def test_gpus_of_which_no_node_is_told() -> None:
    bindings = plan_ranks(machine(nodes=2, cores=4), gpus(None, None))
    assert cpus_of(bindings) == ["0-3", "4-7"]
    assert bindings[0].why[0] == "the NUMA node of cuda:0 is not known"


def test_a_container_that_shows_no_nodes() -> None:
    bindings = plan_ranks(machine(cores=8, told=False), gpus(0, 1))
    assert cpus_of(bindings) == ["0-3", "4-7"] and bindings[0].nodes == ()
    assert bindings[1].why[0] == "cuda:1 is next to NUMA node 1, whose CPUs may not be used"


def test_an_affinity_without_the_node_of_the_gpu() -> None:
    bindings = plan_ranks(machine(nodes=2, cores=4, usable=range(4)), gpus(0, 1))
    assert cpus_of(bindings) == ["0-1", "2-3"]
    assert bindings[1].why[0] == "cuda:1 is next to NUMA node 1, whose CPUs may not be used"


def test_a_lopsided_affinity() -> None:
    """Ranks go where cores are: one on the node with two, three on the one with six."""
    topology = machine(nodes=2, cores=6, usable=[4, 5, *range(6, 12)])
    assert cpus_of(plan_ranks(topology, cpu_ranks(4))) == ["4-5", "6-7", "8-9", "10-11"]


def test_a_rank_without_a_gpu_beside_ranks_with_one() -> None:
    assert cpus_of(plan_ranks(machine(nodes=2, cores=4), [*gpus(0), RankDevice()])) == ["0-3", "4-7"]


def test_more_ranks_than_cores() -> None:
    bindings = plan_ranks(machine(cores=2, smt=2), cpu_ranks(4))
    assert cpus_of(bindings) == ["0", "2", "1", "3"]  # CPUs 0 and 2 are siblings
    assert bindings[0].why == ("4 parts of 2 cores, so cores are shared",)


def test_more_ranks_than_cpus() -> None:
    bindings = plan_ranks(machine(cores=2), cpu_ranks(5))
    assert cpus_of(bindings) == ["0", "0", "0", "1", "1"]
    assert threads_of(bindings) == [(1, 1)] * 5
    assert bindings[4].why == ("5 parts of 2 CPUs, so CPUs are shared",)


@pytest.mark.parametrize(("quota", "ranks", "threads"), [(4.0, 2, 2), (0.5, 1, 1), (3.9, 2, 1), (100.0, 2, 4)])
def test_a_quota_limits_threads(quota: float, ranks: int, threads: int) -> None:
    bindings = plan_ranks(machine(cores=4 * ranks, quota=quota), cpu_ranks(ranks))
    assert threads_of(bindings) == [(threads, threads)] * ranks
    limited = any("the container's time" in why for why in bindings[0].why)
    assert limited == (threads < 4)


def test_threads_that_were_set_are_kept_and_the_host_step_has_its_own() -> None:
    bindings = plan_ranks(machine(cores=16), cpu_ranks(2), omp_num_threads="1")
    assert threads_of(bindings) == [(1, 8)] * 2
    assert bindings[0].why[-1] == "OMP_NUM_THREADS=1 was set"
    for odd in ("", "0", "many", None):
        assert threads_of(plan_ranks(machine(cores=16), cpu_ranks(2), omp_num_threads=odd)) == [(8, 8)] * 2


def test_two_runs_with_half_the_gpus_each_do_not_meet() -> None:
    whole, topology = gpus(0, 0, 0, 0), machine(cores=16)
    first = plan_ranks(topology, whole[:2], hidden=whole[2:])
    second = plan_ranks(topology, [replace(each, name=f"cuda:{i}") for i, each in enumerate(whole[2:])], whole[:2])
    assert cpus_of(first) == ["0-3", "4-7"] and cpus_of(second) == ["8-11", "12-15"]
    assert "2 parts left to GPUs that this run does not see" in first[0].why


def test_gpus_that_nobody_uses_are_no_ones_on_another_node_or_without_a_gpu_here() -> None:
    whole = gpus(0, 0, 1)
    assert cpus_of(plan_ranks(machine(nodes=2, cores=4), whole[:2], hidden=whole[2:])) == ["0-1", "2-3"]
    assert cpus_of(plan_ranks(machine(nodes=1, cores=4), cpu_ranks(1), hidden=whole)) == ["0-3"]


def test_nothing_to_plan() -> None:
    with pytest.raises(ValueError, match="there are 0 ranks and 8 CPUs"):
        plan_ranks(machine(), [])
    with pytest.raises(ValueError, match="there are 1 ranks and 0 CPUs"):
        plan_ranks(Topology((), False, None), cpu_ranks(1))


nodes_of_gpus = st.lists(st.sampled_from([None, 0, 1, 2, 7]), min_size=1, max_size=12)


@given(
    nodes=st.integers(1, 4), cores=st.integers(1, 9), smt=st.integers(1, 2), told=st.booleans(),
    gpu_nodes=nodes_of_gpus, hidden=st.lists(st.sampled_from([0, 1, 9]), max_size=4), drop=st.sets(st.integers(0, 71)),
)  # fmt: skip
def test_any_machine(
    nodes: int, cores: int, smt: int, told: bool, gpu_nodes: list[int | None], hidden: list[int], drop: set[int]
) -> None:
    usable = set(range(nodes * cores * smt)) - drop or {0}
    topology = machine(nodes, cores, smt, told, sorted(usable))
    devices = gpus(*gpu_nodes)
    others = [RankDevice(f"cuda:{i}", f"0000:f{i}:00.0", node) for i, node in enumerate(hidden)]
    bindings = plan_ranks(topology, devices, others)
    assert bindings == plan_ranks(topology, devices, others)
    assert len({binding.torch_threads for binding in bindings}) == 1
    for device, binding in zip(devices, bindings, strict=True):
        assert binding.cpus and set(binding.cpus) <= usable
        assert 1 <= binding.host_threads <= len(binding.cpus) and 1 <= binding.torch_threads <= len(binding.cpus)
        if device.node in topology.nodes and device.node is not None:
            assert binding.nodes == (device.node,)
    for place, one in enumerate(bindings):
        for other in bindings[place + 1 :]:
            shared = set(one.cpus) & set(other.cpus)
            if shared:  # only where there are too few, and then they say so
                assert any("CPUs are shared" in why for why in one.why)
                assert one.cpus == other.cpus and len(one.cpus) == 1


def test_what_a_rank_is_told() -> None:
    (binding,) = plan_ranks(machine(nodes=2, cores=8), gpus(1))
    assert binding_of({"LONGSHORE_BINDING": binding.to_json()}) == binding
    assert str(binding) == (
        "bound to CPU 8-15 of NUMA node 1; host step 7 threads "
        "(next to cuda:0; one core left to the thread that feeds cuda:0)"
    )
    assert str(replace(binding, why=())).endswith("host step 7 threads")  # nothing to add, and no empty brackets
    assert str(unbound(binding, "so it was asked")) == "not bound to CPUs; host step 7 threads (so it was asked)"
    assert binding_of({}) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", "7", json.dumps({"device": "cpu"})])
def test_a_variable_that_something_else_set(text: str) -> None:
    with pytest.raises(ValueError, match=r"LONGSHORE_BINDING is set by longshore launch for its ranks.*unset it"):
        binding_of({"LONGSHORE_BINDING": text})


def test_threads_are_positive_numbers() -> None:
    content = json.loads(plan_ranks(machine(), cpu_ranks(1))[0].to_json()) | {"host_threads": 0}
    with pytest.raises(ValueError, match="unset it"):
        binding_of({"LONGSHORE_BINDING": json.dumps(content)})
