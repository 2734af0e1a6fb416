"""Programs played in processes that may crash or hang, and what is printed of one that fails."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ranks import RankFailure, Ranks

from fuzz.compare import Finding, Outcome, run
from fuzz.generate import program_of
from fuzz.shrink import shrunk

TIMEOUT_S = 60.0
OF_THE_DEVICE = ("streams", "device")
"""Vocabularies that are for the simulated accelerator."""


def play(program: list[str], compare_states: bool, folder: str | None = None) -> Outcome:
    """A case for :class:`Ranks`."""
    return run(program, compare_states, folder)


@dataclass(frozen=True)
class Case:
    """What a seed stands for."""

    seed: int
    without: tuple[str, ...] = ()
    ranks: int = 1
    engine: bool = False
    words_of: str = "scripts"
    """The vocabulary."""

    @property
    def program(self) -> list[str]:
        return program_of(self.seed, self.without, self.engine, self.words_of, self.ranks)

    @property
    def compare_states(self) -> bool:
        return self.seed % 2 == 0


@dataclass
class Tally:
    programs: int = 0
    statements: int = 0
    steps: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)

    def add(self, program: list[str], outcome: Outcome) -> None:
        self.programs += 1
        self.statements += len(program)
        self.steps += outcome.steps
        self.raised += outcome.raised
        self.refused += outcome.refused
        if outcome.finding is not None:
            self.findings[outcome.finding.kind] += 1

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"

        return (
            f"{self.programs} programs of {self.statements} statements, {self.steps} of them steps\n"
            f"raised by both: {listed(self.raised)}\nrefused, as documented: {listed(self.refused)}\n"
            f"found: {listed(self.findings)}"
        )


class Player:
    """Plays programs on ranks that stay. A crash or a hang ends them and is a finding; new ones are started.

    A program may be of several parts, on other numbers of ranks (``ranks(2)``), of which one knows nothing of another
    but checkpoints.
    """

    def __init__(self, world_size: int = 1, device: str = "cpu") -> None:
        self._world_size, self._device = world_size, device
        self._ranks: dict[int, Ranks] = {}

    def __call__(self, program: list[str], compare_states: bool) -> Outcome:
        outcome, place = Outcome(), 0
        with tempfile.TemporaryDirectory(prefix="longshore-fuzz-") as folder:
            for world_size, part in _parts(program, self._world_size):
                outcome.add(self._play(world_size, part, compare_states, folder), place)
                if outcome.finding is not None or outcome.over:
                    break
                place += len(part)
        return outcome

    def _play(self, world_size: int, part: list[str], compare_states: bool, folder: str) -> Outcome:
        ranks = self._ranks.setdefault(world_size, Ranks(world_size, TIMEOUT_S, self._device))
        try:
            outcomes = ranks(play, part, compare_states, folder)
        except RankFailure as failure:
            lines = str(failure).strip().splitlines()
            return Outcome(Finding(f"a rank failed: {lines[-1][:80]}", len(part) - 1, str(failure)))
        return next((each for each in outcomes if each.finding is not None), outcomes[0])

    def stop(self) -> None:
        for each in self._ranks.values():
            each.stop()


def _parts(program: list[str], world_size: int) -> list[tuple[int, list[str]]]:
    """The parts of a program with their ranks; each but the first begins with the statement that says how many."""
    parts: list[tuple[int, list[str]]] = [(world_size, [])]
    for statement in program:
        if found := re.fullmatch(r"ranks\((\d+)\)", statement):
            parts.append((int(found.group(1)), ["pass"]))
        else:
            parts[-1][1].append(statement)
    return parts if parts[0][1] else parts[1:]


Play = Callable[[list[str], bool], Outcome]
"""Runs a program, comparing states after each statement or not."""


def smallest(play: Play, program: list[str], found: Finding, compare_states: bool) -> list[str]:
    """The smallest program with this finding."""

    def fails(changed: list[str]) -> bool:
        outcome = play(changed, compare_states)
        same = outcome.finding is not None and outcome.finding.kind == found.kind
        return same and (begun.incomplete or not outcome.incomplete)

    program = program[: found.place + 1]
    begun = play(program, compare_states)
    if begun.finding is None or begun.finding.kind != found.kind:
        return program  # it does not fail each time
    return shrunk(program, fails)


def fuzz(cases: Iterable[Case], minutes: float, ranks: int, device: str = "cpu") -> Tally:
    """Play cases for some minutes; print each finding, made small."""
    tally, player = Tally(), Player(ranks, device)
    end = time.monotonic() + 60.0 * minutes
    try:
        for case in cases:
            outcome = player(case.program, case.compare_states)
            tally.add(case.program, outcome)
            if outcome.finding is not None and tally.findings[outcome.finding.kind] <= 3:
                small = smallest(player, case.program, outcome.finding, case.compare_states)
                print(report(case, outcome.finding, small), flush=True)
            if time.monotonic() > end:
                break
    finally:
        player.stop()
    return tally


def report(case: Case, found: Finding, program: list[str]) -> str:
    switches = "".join(f" --without '{each}'" for each in case.without)
    switches += " --simulated-device" if case.words_of in OF_THE_DEVICE else ""
    switches += f" --words {case.words_of} --ranks {case.ranks} --{'engine' if case.engine else 'one-line'}"
    return f"""\
---- seed {case.seed}{switches}: {found.kind}
{found.details}
{script_of(case, program)}
"""


def script_of(case: Case, program: list[str]) -> str:
    """A script that runs the program on both sides: with ``tests`` on the path, or by ``--replay``."""
    lines = "\n\n".join(program)
    device = ", 'sim'" if case.words_of in OF_THE_DEVICE else ""
    return f'''\
from fuzz.playing import Player

PROGRAM = """\\
{lines}
"""
if __name__ == "__main__":
    print(Player({case.ranks}{device})(PROGRAM.split("\\n\\n"), compare_states={case.compare_states}).finding)'''


def replay(file: Path) -> None:
    """Run a script that :func:`script_of` printed."""
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})
