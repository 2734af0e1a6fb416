"""Whatever a rank is at when it is killed: the run goes on from a whole checkpoint, and ends with the same weights."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import forking_context

from checkpoint import killed_cases
from checkpoint.killed_cases import Run

STEPS = 5


class Team:
    """Two ranks."""

    def __init__(self, about: Run) -> None:
        store = Path(about.folder).with_suffix(".store")
        store.unlink(missing_ok=True)
        self._processes, self._pipes = [], []
        context = forking_context()
        for rank in range(2):
            mine, theirs = context.Pipe()
            arguments = (rank, 2, str(store), about, theirs)
            process = context.Process(target=killed_cases.run, args=arguments, daemon=True)
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


def result_of(about: Run) -> str:
    """Where a run that nobody disturbs ends."""
    team = Team(about)
    try:
        (one, digest), other = team.last(0), team.last(1)
        assert (one, digest) == other, other
        assert one == "end", digest
        return digest
    finally:
        team.stop()


def kill_once(about: Run, chance: random.Random) -> None:
    """Somewhere in the run, most often in a save."""
    team = Team(about)
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
        told = f"rank {victim} has ended" in said or "another rank" in said
        assert end == "end" or (end == "error" and told), said
    finally:
        team.stop()


@functools.lru_cache
def undisturbed(stage: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return result_of(Run(str(Path(folder) / "run"), stage, False, STEPS))


def check(about: Run, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        kill_once(about, chance)
    assert result_of(about) == undisturbed(about.stage)
    kept = {path.name for path in Path(about.folder).iterdir() if not path.name.startswith(".")}
    assert kept == {"latest", f"global_step{STEPS - 1}", f"global_step{STEPS}"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "async_save"), [(2, False), (3, True)])
def test_killed_while_saving(stage: int, async_save: bool, tmp_path: Path) -> None:
    check(Run(str(tmp_path / "run"), stage, async_save, STEPS), stage, 10)


@pytest.mark.full
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("seed", range(4, 24))
def test_killed_while_saving_often(seed: int, async_save: bool, tmp_path: Path) -> None:
    check(Run(str(tmp_path / "run"), seed % 4, async_save, STEPS), seed, kills=10)
