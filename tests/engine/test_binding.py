"""The engine binds its ranks to CPUs itself where that is safe, and says what it chose."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine.made import lay, machine
from ranks import Ranks
from support import loss_of

import longshore
from engine import binding_cases
from engine.files import file, started, train, without
from longshore.engine import binding
from longshore.engine.binding import Neighbours, Situation, host_cpus, plan_or_refusal
from longshore.kernels import HostKernels
from longshore.machine import BoundThreads, Topology, cpu_list, cpus_of_other_ranks, read_topology, usable_cpus
from longshore.machine.binding import RankBinding

several_cpus = pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two CPUs")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def situations(*gpu_nodes: int | None, cpus: str = "0-15", **about: Any) -> list[Situation]:
    """Ranks of one machine with a GPU each."""
    addresses = [f"0000:{index + 16:02x}:00.0" for index in range(len(gpu_nodes))]
    return [
        Situation(
            "here", cpus=cpus, device=(f"cuda:{index}", addresses[index], node), visible=tuple(addresses), **about
        )
        for index, node in enumerate(gpu_nodes)
    ]


class TestPlan:
    topology = machine(nodes=2, cores=8)

    def test_each_next_to_its_gpu(self, tmp_path: Path) -> None:
        rows = situations(1, 0, 1)
        plans = [plan_or_refusal(rows, place, self.topology, tmp_path) for place in range(3)]
        assert all(isinstance(plan, RankBinding) for plan in plans)
        assert [cpu_list(plan.cpus) for plan in plans if isinstance(plan, RankBinding)] == ["8-11", "0-7", "12-15"]

    def test_gpus_that_no_rank_sees_keep_their_part(self, tmp_path: Path) -> None:
        rows = situations(0)
        about = {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": "0\n"}
        for address in (*rows[0].visible, "0000:99:00.0"):
            lay(tmp_path, {f"sys/bus/pci/devices/{address}/{name}": text for name, text in about.items()})
        plan = plan_or_refusal(rows, 0, self.topology, tmp_path)
        assert isinstance(plan, RankBinding) and cpu_list(plan.cpus) == "0-3"
        # One whose address is not known may be any of them, and is next to none.
        unknown = [replace(rows[0], device=("cuda:0", None, None), visible=(None,))]
        plan = plan_or_refusal(unknown, 0, self.topology, tmp_path)
        assert isinstance(plan, RankBinding) and cpu_list(plan.cpus) == "0-15"

    def test_all_or_none(self, tmp_path: Path) -> None:
        first, second = situations(0, 1)
        second = replace(second, refusal="LONGSHORE_BIND=0")
        assert plan_or_refusal([first, second], 1, self.topology, tmp_path) == "LONGSHORE_BIND=0"
        assert plan_or_refusal([first, second], 0, self.topology, tmp_path) == (
            "another rank of this machine is not: LONGSHORE_BIND=0"
        )

    def test_ranks_that_were_given_different_cpus(self, tmp_path: Path) -> None:
        rows = [*situations(0), *situations(1, cpus="0-7")]
        refusal = plan_or_refusal(rows, 0, self.topology, tmp_path)
        assert refusal == "ranks of this machine may use different CPUs, 0-15 and 0-7"

    def test_small_parts(self, tmp_path: Path) -> None:
        """Unless all ask for it."""
        rows = situations(0, 0, 0)
        assert plan_or_refusal(rows, 0, self.topology, tmp_path) == "a rank's part would be as small as 2 of 16 cores"
        asking = [replace(row, asked=True) for row in rows]
        assert isinstance(plan_or_refusal(asking, 0, self.topology, tmp_path), RankBinding)
        assert isinstance(plan_or_refusal([*asking[:2], rows[2]], 0, self.topology, tmp_path), str)

    def test_torch_keeps_its_threads(self, tmp_path: Path) -> None:
        rows = situations(0, 0, torch_threads=5)
        refusal = plan_or_refusal(rows, 0, self.topology, tmp_path)
        assert refusal == "torch has 5 threads on a rank whose part is 4 CPUs"
        assert isinstance(plan_or_refusal(situations(0, 0, torch_threads=4), 0, self.topology, tmp_path), RankBinding)

    def test_cpus_of_another_run(self, tmp_path: Path) -> None:
        """Seen by one rank, it holds for all."""
        first, second = situations(0, 1)
        rows = [first, replace(second, occupied="3-4")]
        assert plan_or_refusal(rows, 0, self.topology, tmp_path) == "ranks of another run were bound to CPU 3-4"
        one = [replace(first, occupied="9"), replace(second, device=("cuda:1", "0000:11:00.0", 0))]
        assert isinstance(plan_or_refusal(one, 0, self.topology, tmp_path), RankBinding)  # on the other node


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> None:
    """One rank, on a machine of which CPU 0 is all, as far as the plan knows."""
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("LONGSHORE_BIND", raising=False)
    cpu = next(iter(read_topology().cpus))
    monkeypatch.setattr(binding, "read_topology", lambda root: Topology((cpu,), narrowed=False, quota=None))
    monkeypatch.setattr(binding, "cpus_of_other_ranks", lambda cpus: {})


def chosen() -> tuple[str, list[int]]:
    """What an engine says that it chose, and the CPUs while it lives."""
    with started(file()) as engine:
        return engine.explain(print_it=False).cpus, usable_cpus()


@several_cpus
def test_bound_and_released(
    under_torchrun: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = usable_cpus()
    monkeypatch.setenv("LONGSHORE_BIND", "1")
    with caplog.at_level(logging.INFO, logger="longshore"), started(file()) as engine:
        assert usable_cpus() == before[:1]
        engine.explain()
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPUs: "))
    assert line.startswith(f"CPUs: bound to CPU {before[0]}") and line.endswith("torch threads: 1")
    assert [record.getMessage() for record in caplog.records] == ["rank 0: " + line[6:].rpartition("; torch")[0]]
    assert usable_cpus() == before
    during = []
    monkeypatch.setattr("longshore.engine.setup.make_optimizer", lambda *_: during.append(usable_cpus()))
    with pytest.raises(AttributeError), started(file()):  # nothing that is made of it
        pass
    assert during == [before[:1]] and usable_cpus() == before


def test_not_bound_where_a_part_is_small(under_torchrun: None) -> None:
    text, cpus = chosen()
    assert text == "not bound to CPUs (a rank's part would be as small as 1 of 1 cores); torch threads: 1"
    assert cpus == usable_cpus()


def test_switched_off(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_BIND", "0")
    assert "not bound to CPUs (LONGSHORE_BIND=0)" in chosen()[0]


def test_an_affinity_that_was_given_is_kept(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "read_topology", lambda root: replace(machine(cores=4), narrowed=True))
    assert "not bound to CPUs (something gave it CPU 0-3 already)" in chosen()[0]


def test_cpus_that_the_configuration_names_are_kept(under_torchrun: None) -> None:
    cpu = usable_cpus()[0]
    with started(file(longshore={"cpu_set": [cpu]})) as engine:
        assert f"(cpu_set names CPU {cpu})" in engine.explain(print_it=False).cpus


def test_one_process_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LONGSHORE_BIND", "1")
    assert "no launcher started it" in chosen()[0]


def test_another_run_holds_the_cpus(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_BIND", "1")
    cpu = usable_cpus()[0]
    monkeypatch.setattr(binding, "cpus_of_other_ranks", lambda cpus: {17: frozenset([cpu])})
    assert f"not bound to CPUs (ranks of another run were bound to CPU {cpu})" in chosen()[0]


def test_the_launcher_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are the engine's and the one-line optimizer's, where nothing else is said."""
    launched = RankBinding("cpu", (0,), tuple(usable_cpus()), 1, 3, ("part 1 of 2",))
    monkeypatch.setenv("LONGSHORE_BINDING", launched.to_json())
    text, _ = chosen()
    assert text.startswith(f"longshore launch: bound to CPU {cpu_list(usable_cpus())} of NUMA node 0; host step 3")
    assert HostKernels().threads == 3 and HostKernels(2).threads == 2
    assert HostKernels(cpu_set=usable_cpus()[:1]).threads == 1
    made: list[int | None] = []

    def spy(threads: int | None, cpu_set: Any) -> HostKernels:
        made.append(threads)
        return HostKernels(threads, cpu_set)

    monkeypatch.setattr("longshore.optim.offload.HostKernels", spy)
    with started(without(file(), "longshore")) as engine:
        train(engine, [loss_of(engine, 0)])
    assert made == [3]
    moved = replace(launched, cpus=(100, 101))
    monkeypatch.setenv("LONGSHORE_BINDING", moved.to_json())
    assert f"since then moved to CPU {cpu_list(usable_cpus())}" in chosen()[0]


def test_what_is_granted_comes_after_what_is_configured() -> None:
    alone = Neighbours(1, 1, 0)
    assert host_cpus(longshore.Config(train_batch_size=1), alone, granted=5) == (5, None)
    assert host_cpus(longshore.Config(train_batch_size=1, threads=2), alone, granted=5) == (2, None)
    share = host_cpus(longshore.Config(train_batch_size=1, cpu_share=0.0), alone, granted=5)
    assert share == (1, (usable_cpus()[-1],))


@several_cpus
def test_two_ranks(two_ranks: Ranks) -> None:
    """Where all ask for it each gets its own, and the weights are the same bits."""
    bound = two_ranks(binding_cases.bound, ("1", "1"))
    left = two_ranks(binding_cases.bound, ("1", "0"))
    whole = len(bound[0]["before"])
    assert not set(bound[0]["during"]) & set(bound[1]["during"])
    for rank in range(2):
        assert 0 < len(bound[rank]["during"]) < whole
        assert bound[rank]["text"].startswith(f"bound to CPU {cpu_list(bound[rank]['during'])}")
        assert bound[rank]["after"] == bound[rank]["before"] == left[rank]["during"]
        for ours, theirs in zip(bound[rank]["weights"], left[rank]["weights"], strict=True):
            assert torch.equal(ours, theirs)
    assert "another rank of this machine is not: LONGSHORE_BIND=0" in left[0]["text"]


@several_cpus
class TestThreads:
    def test_all_threads_are_bound_and_those_that_come_later(self) -> None:
        first, second = usable_cpus()[:2]
        former, seen, go = os.sched_getaffinity(0), {}, threading.Event()

        def look(name: str, at: int | None = None) -> None:
            if at is not None:
                os.sched_setaffinity(0, {at})
                ready.set()
            go.wait()
            seen[name] = os.sched_getaffinity(0)

        ready = threading.Event()
        threads = [threading.Thread(target=look, args=("before",)), threading.Thread(target=look, args=("own", second))]
        for thread in threads:
            thread.start()
        ready.wait()
        bound = BoundThreads([first])
        threads.append(threading.Thread(target=look, args=("after",)))
        threads[-1].start()
        go.set()
        for thread in threads:
            thread.join()
        assert os.sched_getaffinity(0) == {first}
        bound.release()
        assert os.sched_getaffinity(0) == former
        assert seen == {"before": {first}, "own": {second}, "after": {first}}

    def test_a_cpu_that_is_not_to_be_had(self) -> None:
        former = os.sched_getaffinity(0)
        for cpus in ([100_000], [min(former), 100_000]):
            with pytest.raises(OSError):  # noqa: PT011, the system's own words
                BoundThreads(cpus)
        assert os.sched_getaffinity(0) == former

    def test_ranks_of_other_runs(self) -> None:
        """A process that is bound and has a launcher's variable; others are nobody's business."""
        usable = usable_cpus()
        code = f"import os; os.sched_setaffinity(0, [{usable[1]}]); print('up', flush=True); input()"
        environs = [{"LOCAL_RANK": "0"}, {"MY_LOCAL_RANK": "0"}]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for env in environs
        ]
        try:
            for process in processes:
                assert process.stdout is not None and process.stdout.readline() == "up\n"
            found = cpus_of_other_ranks(usable)
            assert found[processes[0].pid] == {usable[1]}
            assert processes[1].pid not in found and os.getpid() not in found
            assert processes[0].pid not in cpus_of_other_ranks(usable[1:2])  # which is all there is
        finally:
            for process in processes:
                process.communicate("\n")
