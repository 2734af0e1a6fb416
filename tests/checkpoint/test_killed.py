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
from torch_needs import skip_stage_3

from checkpoint import killed_cases
from checkpoint.killed_cases import Run

STEPS = 5


class Team:
    """Ranks that train together."""

    def __init__(self, about: Run, world_size: int = 2) -> None:
        store = Path(about.folder).with_suffix(".store")
        store.unlink(missing_ok=True)
        self._processes, self._pipes = [], []
        context = forking_context()
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, world_size, str(store), about, theirs)
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


def result_of(about: Run, world_size: int = 2) -> str:
    """Where a run that nobody disturbs ends."""
    team = Team(about, world_size)
    try:
        (one, digest), *others = [team.last(rank) for rank in range(world_size)]
        assert all((one, digest) == other for other in others), others
        assert one == "end", digest
        return digest
    finally:
        team.stop()


def kill_once(about: Run, chance: random.Random, after: int | None = None) -> None:
    """Somewhere in the run, most often in a save; that of step ``after``, if it is given."""
    skip_stage_3(about.stage)
    team = Team(about)
    try:
        assert team.next(0)[0] == "ready"
        for _ in range(chance.randrange(4) if after is None else after):
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
def undisturbed(stage: int, optimizer: str, states: str = "fp32") -> str:
    with tempfile.TemporaryDirectory() as folder:
        return result_of(Run(str(Path(folder) / "run"), stage, False, STEPS, optimizer, states))


def check(about: Run, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        kill_once(about, chance)
    assert result_of(about) == undisturbed(about.stage, about.optimizer, about.states)
    kept = {path.name for path in Path(about.folder).iterdir() if not path.name.startswith(".")}
    assert kept == {"latest", f"global_step{STEPS - 1}", f"global_step{STEPS}"}


@pytest.mark.medium
@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize(("stage", "async_save"), [(1, True), (2, True), (3, False)])
def test_killed_with_muon_and_resumed_by_one_rank(stage: int, async_save: bool, tmp_path: Path) -> None:
    """In the middle of the run; the one rank trains on the batches of both, and ends where the plain loop does."""
    about = Run(str(tmp_path / "run"), stage, async_save, STEPS, "Muon")
    kill_once(about, random.Random(stage), after=3)
    latest = (Path(about.folder) / "latest").read_text().strip()
    assert latest in {f"global_step{step}" for step in range(1, STEPS)}
    assert result_of(about, world_size=1) == undisturbed(stage, "Muon") == killed_cases.plain_muon(STEPS)


@pytest.mark.medium
def test_killed_with_states_of_8_bits(tmp_path: Path) -> None:
    """In the middle of the run."""
    about = Run(str(tmp_path / "run"), 3, True, STEPS, states="8bit")
    kill_once(about, random.Random(5), after=3)
    assert (Path(about.folder) / "latest").read_text().strip() in {f"global_step{step}" for step in range(1, STEPS)}
    assert result_of(about) == undisturbed(3, "AdamW", "8bit")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "async_save", "states"), [(0, True, "8bit"), (2, False, "bf16"), (3, False, "8bit")])
def test_killed_while_saving_encoded_states(stage: int, async_save: bool, states: str, tmp_path: Path) -> None:
    check(Run(str(tmp_path / "run"), stage, async_save, STEPS, states=states), stage, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "async_save"), [(2, False), (3, True)])
def test_killed_while_saving(stage: int, async_save: bool, tmp_path: Path) -> None:
    check(Run(str(tmp_path / "run"), stage, async_save, STEPS), stage, 10)


@pytest.mark.full
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("seed", range(4, 24))
def test_killed_while_saving_often(seed: int, async_save: bool, tmp_path: Path) -> None:
    check(Run(str(tmp_path / "run"), seed % 4, async_save, STEPS), seed, kills=10)
