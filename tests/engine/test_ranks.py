from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from longshore.engine.ranks import Ranks, RendezvousError, Start, join

CHILD = Path(__file__).with_name("ranks_child.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environments_of(rank: int, ports: list[int]) -> list[dict[str, str]]:
    """One process's variables under torchrun, Slurm and Open MPI; nothing but the port is told in the second."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
        },
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
            "MASTER_PORT": str(ports[1]),
        },
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_PORT": str(ports[2]),
        },
    ]


@pytest.mark.slow
def test_two_ranks_meet_however_they_were_started(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(tmp_path / "store"), json.dumps(environments_of(rank, ports))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], done
    reports: list[dict[str, Any]] = [json.loads(out) for out, _ in done]
    for rank, report in enumerate(reports):
        same = {"rank": rank, "world_size": 2, "device": "cpu", "backend": "gloo", "total": 11.0}
        made = {**same, "owns_group": True, "left": False}
        assert report["joined"] == [{**made, "local_rank": local} for local in (rank, 0, rank)]
        # Someone else's group says who we are, and outlives us.
        assert report["adopted"] == {**same, "owns_group": False, "left": True, "local_rank": 5}
        assert "backend='nccl' was asked for, and the process group is already" in report["wrong backend"]


def test_one_rank_and_nothing_set_makes_no_group() -> None:
    ranks = join(environ={})
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert ranks == Ranks(0, 1, 0, torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"), None, False)
    assert not dist.is_initialized()
    ranks.close()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ranks.rank = 1  # type: ignore[misc]


def test_one_rank_under_torchrun_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ranks = join(device="cpu", timeout=30)
    try:
        assert ranks.owns_group and ranks.group is dist.group.WORLD
        again = join(device="cpu")
        assert again.group is ranks.group and not again.owns_group
        again.close()
        assert dist.is_initialized()
        with pytest.raises(ValueError, match=r"already initialised with .*leave backend out"):
            join("mpi" if "mpi" in dist.Backend.backend_list else "ucc", "cpu")
    finally:
        ranks.close()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_ranks_that_do_not_come_are_missed_in_time() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "127.0.0.1"}
    began = time.monotonic()
    with pytest.raises(
        RendezvousError, match=r"rank 0 of 2 \(Slurm variables\).*within 1 s: rank 1 did not come.*srun.*RANK=0"
    ):
        join(device="cpu", timeout=timedelta(seconds=1), environ={**environ, "MASTER_PORT": str(free_port())})
    assert time.monotonic() - began < 20  # torch's own limits are minutes
    assert not dist.is_initialized()


def test_a_rank_has_joined_when_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ended earlier would break the connections that gloo is still making on another."""
    store = HashStore()
    made: list[int] = []

    def make(backend: str, rank: int, **_: Any) -> None:
        time.sleep(0.3 * rank)
        made.append(rank)

    def joined(rank: int) -> list[int]:
        join(device="cpu", timeout=60, environ=environments_of(rank, [1, 1, 1])[0])
        return list(made)

    monkeypatch.setattr("longshore.engine.ranks.store_at", lambda *_: store)
    monkeypatch.setattr(dist, "init_process_group", make)
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(joined, [0, 1])) == [[0, 1], [0, 1]]


def test_a_rank_that_ends_before_it_has_joined_is_missed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.engine.ranks.store_at", lambda *_: HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: None)
    with pytest.raises(RendezvousError, match=r"rank 0 of 2.*within 0\.2 s: rank 1 did not come\. Check .*GLOO_SOCKET"):
        join(device="cpu", timeout=0.2, environ=environments_of(0, [1, 1, 1])[0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "glo"}, ValueError, "did you mean 'gloo'"),
        ({"backend": 3}, TypeError, "backend is a name"),
        ({"device": "gpu"}, ValueError, "device='gpu' is not a device"),
        ({"device": 0}, TypeError, "device is a name"),
        ({"timeout": 0}, ValueError, "above 0 seconds"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "above 0 seconds"),
        ({"timeout": "1"}, TypeError, "timedelta or a number of seconds"),
        ({"device": "cuda:99"}, ValueError, r"asks for cuda:99, and this process sees \d+ CUDA devices"),
        ({"environ": {"RANK": "1"}}, ValueError, "RANK is set, and WORLD_SIZE"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        join(**{"environ": {}, **arguments})
    assert not dist.is_initialized()


def test_nccl_is_not_for_the_cpu() -> None:
    environ = environments_of(0, [1, 1, 1])[0]
    with pytest.raises(ValueError, match="backend='nccl' cannot reduce tensors of the cpu: use gloo"):
        join("nccl", "cpu", environ=environ)


def test_the_device_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    made: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr("longshore.engine.ranks.store_at", lambda *_: HashStore())
    monkeypatch.setattr(Start, "meet", lambda self: self._store)
    monkeypatch.setattr(Start, "connect", lambda self, store, make: make())
    environ = {**environments_of(1, [1, 1, 1])[0], "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    for count, expected in ((4, 3), (1, 0)):  # with one device in sight, a scheduler hid the others
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        assert join(environ=environ).device == torch.device("cuda", expected)
    assert chosen == [3, 3, 0, 0] and made == ["nccl", "nccl"]  # on this thread, and on the one that connects
    assert join(environ=environ, device="cpu").device == torch.device("cpu") and made[-1] == "gloo"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 3 asks for cuda:3, and this process sees 2"):
        join(environ=environ)
