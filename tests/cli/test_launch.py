"""``longshore launch``: what each rank gets, and that all else is torchrun's."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Ran
from machine.made import lay, machine

from longshore.machine import cpu_list, start, usable_cpus

launch = importlib.import_module("longshore.cli.launch")  # the package has the command under that name

REPORT = """
import json, os, sys, time
before = [name for name in sys.modules if name.partition(".")[0] in ("torch", "longshore")]
import torch
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "LONGSHORE_BINDING", "LONGSHORE_LAUNCH", "MINE")
about = {
    "argv": sys.argv, "path": sys.path[0], "cpus": sorted(os.sched_getaffinity(0)), "before": before,
    "threads": torch.get_num_threads(), "name": __name__, "file": __file__, "unbuffered": sys.stdout.write_through,
    **{name: os.environ.get(name) for name in names},
}
mine, other = (os.path.join(os.environ["OUT"], rank) for rank in (os.environ["RANK"], "0"))
with open(mine + ".writing", "w") as out:
    json.dump(about, out)
os.rename(mine + ".writing", mine)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    while not os.path.exists(other):  # the launcher ends it as soon as this one has ended
        time.sleep(0.01)
    sys.exit(7)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]:
    """``longshore launch`` in a process of its own, and what each rank saw."""

    def run(*arguments: object, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        inherited = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-m", "longshore", "launch", *map(str, arguments)],
            env={**inherited, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "MINE": "kept", **environ},
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done, [json.loads(file.read_text()) for file in sorted(tmp_path.glob("[0-9]"))]

    return run


def planned(monkeypatch: pytest.MonkeyPatch, **about: Any) -> None:
    monkeypatch.setattr(launch.machine, "read_topology", lambda: machine(**about))
    monkeypatch.setattr(launch.machine, "visible_gpus", dict)
    for name in ("OMP_NUM_THREADS", "LONGSHORE_BIND"):
        monkeypatch.delenv(name, raising=False)


def test_dry_run(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, nodes=2, cores=4)
    ran = cli("launch", "--nproc", "3", "--dry-run", "train.py", "--lr", "0.1", "--dry-run", "a b")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "rank  device  NUMA node  CPUs  torch threads  host threads  why",
        "0     cpu     0          0-1   2              2             part 1 of 2",
        "1     cpu     0          2-3   2              2             part 2 of 2",
        "2     cpu     1          4-7   2              4",
        f"each runs: {sys.executable} -u train.py --lr 0.1 --dry-run 'a b'",
    ]
    assert "there is no script train.py here" in ran.err


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--nproc=2", "-m"], "{python} -u -m train.py"),
        (["--nproc_per_node", "2", "--no-python"], "train.py"),
        (["--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv_endpoint=h:1"], "{python} -u train.py"),
    ],
    ids=str,
)
def test_options_of_torchrun(
    options: list[str], command: str, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch)
    *rows, last = cli("launch", *options, "--dry-run", "train.py").out.splitlines()
    assert len(rows) == 3
    assert last == "each runs: " + command.format(python=sys.executable)


def test_gpus_and_nodes(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    addresses = ["0000:1a:00.0", "0000:3b:00.0", "0000:5c:00.0"]
    about = {"vendor": "0x10de\n", "class": "0x030200\n"}
    files = {f"sys/bus/pci/devices/{each}/{name}": text for each in addresses for name, text in about.items()}
    files |= {f"sys/bus/pci/devices/{each}/numa_node": f"{i // 2}\n" for i, each in enumerate(addresses)}
    root = lay(tmp_path, files)
    visible = {"cuda:0": addresses[1], "cuda:1": addresses[2]}  # the first is hidden
    devices, hidden = launch.devices_of(3, visible, root)
    assert [(each.name, each.node) for each in devices] == [("cuda:0", 0), ("cuda:1", 1), ("cpu", None)]
    assert [(each.address, each.node) for each in hidden] == [(addresses[0], 0)]
    unknown, nothing = launch.devices_of(1, {"cuda:0": None}, root)
    assert (unknown[0].name, unknown[0].address, unknown[0].node, nothing) == ("cuda:0", None, None, [])
    planned(monkeypatch, nodes=2, cores=4)
    monkeypatch.setattr(launch.machine, "visible_gpus", lambda: visible)
    monkeypatch.setattr(launch, "devices_of", lambda count, seen: (devices[:count], hidden))
    ran = cli("launch", "--nproc", "2", "--dry-run", "x.py")
    assert ran.out.splitlines()[1].split()[:4] == ["0", "cuda:0", "0", "2-3"]
    assert ran.out.splitlines()[2].split()[:6] == ["1", "cuda:1", "1", "4-7", "2", "3"]
    assert "2 ranks and" not in ran.err
    assert "3 ranks and 2 CUDA devices" in cli("launch", "--nproc", "3", "--dry-run", "x.py").err


def test_threads_that_were_set(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """A 1 that some launcher left does not starve the host step."""
    planned(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    row = cli("launch", "--nproc", "2", "--dry-run", "x.py").out.splitlines()[1]
    assert row.split()[4:6] == ["1", "4"] and row.endswith("OMP_NUM_THREADS=1 was set")


def test_switched_off(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch)
    monkeypatch.setenv("LONGSHORE_BIND", "0")
    row = cli("launch", "--nproc", "2", "--dry-run", "x.py").out.splitlines()[1]
    assert row.split() == ["0", "cpu", "-", "any", "4", "4", "LONGSHORE_BIND=0"]
    monkeypatch.setenv("LONGSHORE_BIND", "maybe")
    assert "LONGSHORE_BIND must be 0 or 1, and is 'maybe'" in cli("launch", "--dry-run", "x.py").refused()


def test_limits(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch)
    monkeypatch.setattr(launch.machine, "shared_free_bytes", lambda: 64 << 20)
    monkeypatch.setattr(launch.machine, "locked_limit_bytes", lambda: 8 << 20)
    assert "/dev/shm has 64.0 MiB" in cli("launch", "--nproc", "2", "--dry-run", "-m", "x").err
    assert cli("launch", "--nproc", "1", "--dry-run", "-m", "x").err == ""
    monkeypatch.setattr(launch.machine, "visible_gpus", lambda: {"cuda:0": "0000:1a:00.0"})
    shared, locked = cli("launch", "--nproc", "1", "--dry-run", "-m", "x").err.splitlines()
    assert "docker run --shm-size" in shared
    assert "may lock 8.0 MiB of memory" in locked and "ulimit -l unlimited" in locked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--numa-binding=node", "x.py"],
            "--numa-binding binds ranks too: leave it out, or use torchrun",
            marks=pytest.mark.needs_torch("torchrun --numa-binding"),
        ),
        (["--run-path", "/x.py"], "--run-path starts ranks that have torch already, too late to bind them"),
        (["--no-python", "-m", "x"], "leave one of them out"),
        (["--nproc", "many", "x.py"], "--nproc many: Unsupported nproc_per_node value"),
        (["--nproc", "0", "x.py"], "--nproc must be at least 1, not 0"),
    ],
    ids=str,
)
def test_refused(arguments: list[str], message: str, cli: Callable[..., Ran]) -> None:
    ran = cli("launch", *arguments)
    assert ran.code == 2 and message in ran.refused()


def test_what_torchrun_does_not_know_is_its_parsers_error(capfd: pytest.CaptureFixture[str]) -> None:
    from longshore.cli import main

    for arguments in (["--nope", "x.py"], []):
        with pytest.raises(SystemExit) as ended:
            main(["launch", *arguments])
        assert ended.value.code == 2
        assert "longshore launch: error: " in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    out = capfd.readouterr().out
    assert "--dry-run" in out and "--rdzv-endpoint" in out and "before torch is imported" in " ".join(out.split())


@pytest.mark.slow
def test_ranks(run: Callable[..., Any], tmp_path: Path) -> None:
    """Bound before torch is there; otherwise as python would have started them, with torchrun's exit code."""
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    done, ranks = run("--nproc", "2", script, "fail", "--nproc", "a b")
    assert done.returncode == 1
    assert f"{script} FAILED" in done.stderr and "exitcode  : 7" in done.stderr  # torchrun's report
    assert "Traceback" not in done.stderr and "Setting OMP_NUM_THREADS" not in done.stderr
    cpus = usable_cpus()
    for rank, about in enumerate(ranks):
        assert about["argv"] == [str(script), "fail", "--nproc", "a b"]
        assert (about["path"], about["file"], about["name"]) == (str(tmp_path), str(script), "__main__")
        assert about["before"] == [] and about["unbuffered"]
        assert (about["RANK"], about["LOCAL_RANK"], about["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert about["MINE"] == "kept" and about["LONGSHORE_LAUNCH"] is None
        binding = json.loads(about["LONGSHORE_BINDING"])
        assert about["cpus"] == binding["cpus"]
        assert about["threads"] == int(about["OMP_NUM_THREADS"]) == binding["torch_threads"]
    if len(cpus) > 1:
        assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])


class TestStart:
    """The small program that each rank begins as."""

    def begin(self, monkeypatch: pytest.MonkeyPatch, cpus: list[int]) -> list[list[str]]:
        began: list[list[str]] = []
        binding = {"cpus": cpus, "nodes": [0], "torch_threads": 3, "host_threads": 2, "why": [], "device": "cpu"}
        other = {**binding, "cpus": [999]}
        monkeypatch.setenv("LONGSHORE_LAUNCH", json.dumps({"program": ["python", "-u"], "bindings": [other, binding]}))
        monkeypatch.setenv("LONGSHORE_BINDING", "of another")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(start.os, "execvp", lambda program, arguments: began.append([program, *arguments]))
        start.main(["--rank=1", "script.py", "--x"])
        return began

    def test_becomes_the_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound: list[Any] = []
        monkeypatch.setattr(start.os, "sched_setaffinity", lambda *given: bound.append(given))
        assert self.begin(monkeypatch, [4, 5]) == [["python", "python", "-u", "script.py", "--x"]]
        assert bound == [(0, [4, 5])]
        assert os.environ["OMP_NUM_THREADS"] == "3" and "LONGSHORE_LAUNCH" not in os.environ
        assert json.loads(os.environ["LONGSHORE_BINDING"])["cpus"] == [4, 5]

    def test_a_cpu_that_went_away(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Training goes on, and says that it is not bound."""
        assert self.begin(monkeypatch, [100_000]) != []
        assert "longshore: local rank 1 is not bound to CPUs: " in capsys.readouterr().err
        binding = json.loads(os.environ["LONGSHORE_BINDING"])
        assert binding["cpus"] == [] and binding["why"][0].startswith("binding failed: ")


@pytest.mark.slow
def test_modules_and_programs(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(REPORT)
    done, ranks = run("--nproc=1", "--module", "package", "x", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert ranks[0]["argv"][1:] == ["x"] and ranks[0]["before"] == []
    assert cpu_list(ranks[0]["cpus"]) == cpu_list(usable_cpus())
    done, _ = run("--nproc=2", "--no-python", "sh", "-c", "echo rank $RANK $OMP_NUM_THREADS", OMP_NUM_THREADS="5")
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 5", "rank 1 5"]
    done, _ = run("--no-python", tmp_path / "nowhere")
    assert done.returncode == 1 and "nowhere: No such file or directory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number",
    [
        ("longshore", signal.SIGINT),
        pytest.param("longshore", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("torch.distributed.run", signal.SIGINT, marks=pytest.mark.full),
        ("torch.distributed.run", signal.SIGTERM),
    ],
)
def test_signals(number: signal.Signals, launcher: str, tmp_path: Path) -> None:
    """They reach the ranks, and the exit code is torchrun's."""
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nos.write(1, b'up\\n')\ntime.sleep(100)\n")  # one write: lines do not mix
    launching = [launcher, *(["launch"] if launcher == "longshore" else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", *launching, "--nproc-per-node=2", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 1
    assert number.name in errors or "got signal" in errors


def test_a_script_that_is_not_there_starts_nothing(cli):
    ran = cli("launch", "--nproc", "2", "nowhere.py")
    assert ran.code == 1 and ran.err.strip() == "longshore: there is no script nowhere.py"
