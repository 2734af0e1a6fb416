"""A rank that closes while a collective is under way, and ends: not by SIGABRT, whenever the others end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from longshore.ranks.waiting import wait_for
from longshore.transfer.runner import Worker

_BEGIN = """
import os, sys, time, torch
import torch.distributed as dist
from longshore.ranks.meeting import Action
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.twin_groups import twins_of

CPU = torch.device("cpu")
rank, delay_s = int(sys.argv[1]), float(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
thread = CollectiveThread(twins_of(None, CPU), CPU, limit_bytes=1)
thread.run(lambda: thread.meet(Action.STEP, 0, 0))
"""

_CLOSES = """
if rank == 1:
    thread.begin(Action.STEP, 1, 0)
    thread.close()
else:
    time.sleep(delay_s)
    os._exit(0)
"""

_LEAVES = """
if rank == 1:
    thread.leave(1)
    thread.drain()
    thread.close()
    open(sys.argv[2] + ".closed", "w").close()
else:
    while not os.path.exists(sys.argv[2] + ".closed"):
        time.sleep(delay_s)
    os._exit(0)
"""

_FAILS = """
if rank == 1:
    class Late:
        def __del__(self):
            time.sleep(0.3)  # Python shuts down

    sys.late = Late()
    thread.submit(lambda: thread.meet(Action.STEP, 1, 0))
    time.sleep(0.02)
    raise AssertionError
else:
    time.sleep(delay_s)
    os._exit(0)
"""


def _ends(script: str, delay_s: float, tmp_path: Path) -> tuple[list[int], list[str]]:
    """Return the exit codes of two ranks, and what they say."""
    command = [sys.executable, "-c", script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(delay_s)], env=environ, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=60)[1].decode() for each in ranks]
    return [each.returncode for each in ranks], said


@pytest.mark.medium
@pytest.mark.parametrize("delay_s", [0.05, pytest.param(0.2, marks=pytest.mark.slow)])
def test_the_end_of_a_process(delay_s: float, tmp_path: Path) -> None:
    codes, said = _ends(_BEGIN + _CLOSES, delay_s, tmp_path)
    assert codes == [0, 0], said


@pytest.mark.medium
def test_closing_while_no_other_rank_hears_that_this_one_left(tmp_path: Path) -> None:
    codes, said = _ends(_BEGIN + _LEAVES, 0.05, tmp_path)
    assert codes == [0, 0], said


@pytest.mark.medium
@pytest.mark.parametrize(
    "delay_s", [0.7, pytest.param(0.2, marks=pytest.mark.slow), pytest.param(0.3, marks=pytest.mark.slow)]
)
def test_a_script_that_fails_while_a_thread_waits_for_other_ranks(delay_s: float, tmp_path: Path) -> None:
    codes, said = _ends(_BEGIN + _FAILS, delay_s, tmp_path)
    assert codes == [0, 1], said
    assert "terminate" not in said[1]


class Endless:
    """A collective that gloo does not end."""

    def __init__(self, ends: bool = False) -> None:
        self.waits = 0
        self._ends = ends

    def is_completed(self) -> bool:
        return self._ends and self.waits > 2

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.is_completed():
            assert timeout is not None
            self.waits += 1
            time.sleep(timeout.total_seconds())
            raise RuntimeError("timed out")


@pytest.mark.medium
def test_a_collective_that_waits_for_a_rank_that_ended() -> None:
    """gloo tells only the ranks that exchange something with that one directly."""
    looked = []

    def gone() -> list[int]:
        looked.append(time.monotonic())
        return [2] if len(looked) > 1 else []

    with pytest.raises(ConnectionError, match="another rank does not answer"):
        wait_for(Endless(), None, gone)
    assert len(looked) == 2


def test_a_collective_that_ends_although_a_rank_has_ended() -> None:
    """That rank did its part before."""
    wait_for(Endless(ends=True), None, lambda: [2])


class Slow(Endless):
    """A collective that ends a moment after Python began to end the process."""

    def __init__(self) -> None:
        super().__init__(ends=True)
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.waits += 1
        else:
            super().wait(timeout)


def test_a_thread_goes_on_at_the_end_of_a_process_only_if_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coming back from native code while Python shuts down, it would end the process with SIGABRT."""
    ending = threading.Event()
    monkeypatch.setattr("longshore.ranks.waiting.exiting", ending)
    work, runner = Slow(), Worker(1 << 20, lambda: None, "longshore-test", patience_s=1.0)
    runner.submit(lambda: wait_for(work), 0)
    ending.set()
    work.ended = True
    time.sleep(0.5)
    assert work.waits == 0, "nobody waits for the job"
    assert runner.drain() is None and work.waits == 1
    runner.close()
