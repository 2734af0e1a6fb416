"""Whatever a rank is at when it is killed: the run goes on from a whole checkpoint, and ends with the same weights."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint import killed_cases

STEPS = 5


@pytest.fixture(scope="module")
def server() -> Any:
    """Forks processes that have torch already: each start takes milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["checkpoint.killed_cases"])
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    yield context
    os.environ.pop("PYTHONPATH")
    if former is not None:
        os.environ["PYTHONPATH"] = former


class Team:
    """Two ranks."""

    def __init__(self, server: Any, folder: Path, stage: int) -> None:
        store = folder.with_suffix(".store")
        store.unlink(missing_ok=True)
        self._processes, self._pipes = [], []
        for rank in range(2):
            mine, theirs = server.Pipe()
            arguments = (rank, 2, str(store), str(folder), stage, STEPS, theirs)
            process = server.Process(target=killed_cases.run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def next(self, rank: int) -> tuple[str, Any]:
        """What a rank says next; ``("gone", None)`` where it was killed."""
        try:
            assert self._pipes[rank].poll(60), "it hangs"
            return self._pipes[rank].recv()
        except EOFError:
            return "gone", None

    def last(self, rank: int) -> tuple[str, Any]:
        found = self.next(rank)
        while found[0] in ("ready", "saving"):
            found = self.next(rank)
        return found

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def result_of(server: Any, folder: Path, stage: int) -> str:
    """Where a run that nobody disturbs ends."""
    team = Team(server, folder, stage)
    try:
        (one, digest), other = team.last(0), team.last(1)
        assert (one, digest) == other, other
        assert one == "end", digest
        return digest
    finally:
        team.stop()


def kill_once(server: Any, folder: Path, stage: int, chance: random.Random) -> None:
    """Somewhere in the run, most often in a save."""
    team = Team(server, folder, stage)
    try:
        assert team.next(0)[0] == "ready"
        for _ in range(chance.randrange(4)):
            if team.next(0)[0] == "end":
                return  # earlier kills left it little to do
        time.sleep(chance.random() * 0.03)
        victim = chance.randrange(2)
        team.kill(victim)
        end, said = team.last(1 - victim)
        # Told that the other one is gone, unless both were through.
        assert end == "end" or (end == "error" and "another rank" in said), said
    finally:
        team.stop()


@functools.lru_cache
def undisturbed(server: Any, stage: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return result_of(server, Path(folder) / "run", stage)


def check(server: Any, folder: Path, stage: int, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        kill_once(server, folder, stage, chance)
    assert result_of(server, folder, stage) == undisturbed(server, stage)
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert kept == {"latest", f"global_step{STEPS - 1}", f"global_step{STEPS}"}


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_saving(seed: int, server: Any, tmp_path: Path) -> None:
    check(server, tmp_path / "run", 2 + seed, seed, kills=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_killed_while_saving_often(seed: int, server: Any, tmp_path: Path) -> None:
    check(server, tmp_path / "run", seed % 4, seed, kills=10)
