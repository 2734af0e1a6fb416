from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.engine.ranks import ALONE, Launch, detect, first_host


def torchrun(rank: int = 3, world_size: int = 8, local_rank: int = 1) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "1234",
    }


def slurm(rank: int = 3, tasks: int = 8, local_rank: int = 1) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(tasks),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_JOB_NODELIST": "gpu[012-014,7]",
        "SLURM_JOB_ID": "4242",
    }


def open_mpi(rank: int = 3, size: int = 8, local_rank: int = 1) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": "node7",
    }


def pmi(rank: int = 3, size: int = 8) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": "1", "MASTER_ADDR": "node7"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_set_is_one_rank_without_a_group() -> None:
    assert detect({"PATH": "/bin"}) == ALONE
    assert not ALONE.needs_group
    # A meeting point says nothing about ranks, nor does a shell within a Slurm allocation.
    assert detect({"MASTER_ADDR": "here", "MASTER_PORT": "1"}) == ALONE
    assert detect(without(slurm(), "SLURM_PROCID", "SLURM_LOCALID")) == ALONE


def test_torchrun() -> None:
    assert detect(torchrun()) == Launch(3, 8, 1, "RANK", "node7", 1234)


def test_one_rank_of_torchrun_has_a_group_and_one_set_by_hand_has_not() -> None:
    assert detect(torchrun(0, 1, 0)).needs_group
    by_hand = detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert by_hand == Launch(0, 1, 0, "RANK") and not by_hand.needs_group
    assert not detect(slurm(0, 1, 0)).needs_group


def test_slurm() -> None:
    found = detect(slurm())
    assert (found.rank, found.world_size, found.local_rank, found.launcher) == (3, 8, 1, "Slurm")
    assert found.master_addr == "gpu012"
    assert found.needs_group


def test_slurms_port_is_the_jobs_own_and_the_same_on_all_ranks() -> None:
    ports = {detect({**slurm(rank, 8, 0)}).master_port for rank in range(8)}
    ports |= {detect({**slurm(), "SLURM_JOB_ID": "4243"}).master_port}
    ports |= {detect({**slurm(), "SLURM_STEP_ID": "1"}).master_port}
    assert len(ports) == 3 and all(20000 <= port < 32000 for port in ports)
    chosen = detect({**slurm(), "MASTER_ADDR": "there", "MASTER_PORT": "77"})
    assert (chosen.master_addr, chosen.master_port) == ("there", 77)
    assert detect(without(slurm(), "SLURM_JOB_ID")).master_port == 29500


def test_an_srun_step_counts_rather_than_the_job() -> None:
    # srun -n 2 in a job of 8; and the one task of an interactive shell in it.
    assert detect({**slurm(1, 8, 1), "SLURM_STEP_NUM_TASKS": "2"}).world_size == 2
    assert detect({**slurm(0, 8, 0), "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


def test_open_mpi() -> None:
    assert detect({**open_mpi(), "MASTER_PORT": "9"}) == Launch(3, 8, 1, "Open MPI", "node7", 9)
    one_host = {**without(open_mpi(), "MASTER_ADDR"), "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert detect(one_host).master_addr == "127.0.0.1"
    in_slurm = {**slurm(0, 2, 0), **without(open_mpi(), "MASTER_ADDR")}
    found = detect(in_slurm)
    assert (found.rank, found.launcher, found.master_addr) == (3, "Open MPI", "gpu012")


def test_pmi() -> None:
    assert detect(pmi()) == Launch(3, 8, 1, "PMI", "node7", 29500)
    by_srun = {**slurm(3, 8, 2), **without(pmi(), "MPI_LOCALRANKID", "MASTER_ADDR")}
    assert detect(by_srun).local_rank == 2
    # Started by mpiexec within a job: the job's place on the machine is not this rank's.
    with pytest.raises(ValueError, match=r"PMI_RANK and PMI_SIZE are set, and MPI_LOCALRANKID is not"):
        detect({**by_srun, "SLURM_PROCID": "0"})


def test_the_innermost_launcher_is_right() -> None:
    within_slurm = {**slurm(0, 2, 0), **torchrun(3, 8, 1)}
    assert detect(within_slurm).launcher == "RANK"
    agreeing = {**slurm(), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", **torchrun()}
    assert detect(agreeing).launcher == "RANK"
    own_order = {**agreeing, "SLURM_PROCID": "5", "TORCHELASTIC_RUN_ID": "x"}
    assert detect(own_order).rank == 3
    assert detect({**open_mpi(0, 2), **torchrun(), "TORCHELASTIC_RUN_ID": "x"}).rank == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "RANK is set, and WORLD_SIZE and LOCAL_RANK are not: set all of them, or none"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, and RANK and WORLD_SIZE are not"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE is set, and RANK is not"),
        (without(torchrun(), "LOCAL_RANK"), "RANK and WORLD_SIZE are set, and LOCAL_RANK is not"),
        (without(torchrun(), "MASTER_PORT"), "MASTER_PORT is not set: where rank 0 listens for the other 7"),
        (without(torchrun(), "MASTER_PORT", "MASTER_ADDR"), "MASTER_ADDR and MASTER_PORT are not set"),
        (torchrun(8, 8, 1), "RANK=8 must be below WORLD_SIZE=8"),
        (torchrun(1, 8, 2), "LOCAL_RANK=2 must not be above RANK=1"),
        ({**torchrun(), "RANK": "one"}, "RANK must be an integer of at least 0, and is 'one'"),
        ({**torchrun(), "RANK": "-1"}, "RANK must be an integer of at least 0, and is '-1'"),
        ({**torchrun(), "RANK": ""}, "RANK must be an integer of at least 0, and is ''"),
        ({**torchrun(), "WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1, and is '0'"),
        ({**torchrun(), "MASTER_PORT": "70000"}, "MASTER_PORT must be an integer of at least 1 and at most 65535"),
        (without(slurm(), "SLURM_NTASKS"), "SLURM_PROCID and SLURM_LOCALID are set, and SLURM_STEP_NUM_TASKS is not"),
        (without(slurm(), "SLURM_LOCALID"), "SLURM_LOCALID is not"),
        (without(slurm(), "SLURM_JOB_NODELIST"), "MASTER_ADDR or SLURM_JOB_NODELIST is not set"),
        ({**slurm(), "SLURM_JOB_NODELIST": "gpu[1"}, r"SLURM_JOB_NODELIST: 'gpu\[1' is no list of hosts"),
        (without(open_mpi(), "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
        (without(open_mpi(), "MASTER_ADDR"), "MASTER_ADDR is not set: set MASTER_ADDR to the host of rank 0"),
        ({**open_mpi(2), **torchrun()}, "RANK=3, WORLD_SIZE=8 contradict OMPI_COMM_WORLD_RANK=2, .*SIZE=8 of Open MPI"),
        ({**open_mpi(), **torchrun(0, 1, 0)}, "RANK=0, WORLD_SIZE=1 contradict OMPI_COMM_WORLD_RANK=3"),
        ({**open_mpi(0, 8, 0), **torchrun(0, 1, 0)}, "RANK=0, WORLD_SIZE=1 contradict OMPI_COMM_WORLD_RANK=0"),
        ({**pmi(2), **torchrun()}, "contradict PMI_RANK=2, PMI_SIZE=8 of PMI: unset"),
        (
            {**slurm(2), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", **torchrun()},
            "contradict SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=8, SLURM_NTASKS=8 of Slurm",
        ),
    ],
)
def test_half_set_and_contradicting_variables_are_one_error_that_names_them(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        detect(environ)
    assert str(caught.value).startswith("the environment does not say who this rank is")


def test_several_problems_are_one_error() -> None:
    with pytest.raises(ValueError, match=r"RANK must be .*'x'.*LOCAL_RANK must be .*'y'.*MASTER_PORT is not set"):
        detect({**without(torchrun(), "MASTER_PORT"), "RANK": "x", "LOCAL_RANK": "y"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("node[01-04]", "node01"),
        ("node[7,9-12],gpu3", "node7"),
        ("rack[2-3]n[07-09,12],login", "rack2n07"),
        ("n[1-2]-ib.cluster", "n1-ib.cluster"),
        (" node-a-1 ", "node-a-1"),
    ],
)
def test_the_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",a", "node[", "node[]", "node[1-2", "node]1", "[,1]"])
def test_what_is_no_list_of_hosts(nodelist: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        first_host(nodelist)


@given(st.integers(0, 999), st.integers(0, 50), st.sampled_from(["%d", "%03d"]), st.text("abc-.", max_size=3))
def test_the_first_host_of_any_range(first: int, more: int, form: str, suffix: str) -> None:
    low, high = form % first, form % (first + more)
    assert first_host(f"n[{low}-{high},1000]{suffix},other[1-2]") == f"n{low}{suffix}"
