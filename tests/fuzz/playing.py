"""Programs played in processes that may crash or hang, and what is printed of one that fails."""

from __future__ import annotations

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


def play(program: list[str], compare_states: bool) -> Outcome:
    """A case for :class:`Ranks`."""
    return run(program, compare_states)


@dataclass(frozen=True)
class Case:
    """What a seed stands for."""

    seed: int
    without: tuple[str, ...] = ()
    ranks: int = 1
    engine: bool = False

    @property
    def program(self) -> list[str]:
        return program_of(self.seed, self.without, self.engine)

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
    """Plays programs on ranks that stay. A crash or a hang ends them and is a finding; new ones are started."""

    def __init__(self, world_size: int = 1) -> None:
        self._ranks = Ranks(world_size, TIMEOUT_S)

    def __call__(self, program: list[str], compare_states: bool) -> Outcome:
        try:
            outcomes = self._ranks(play, program, compare_states)
        except RankFailure as failure:
            lines = str(failure).strip().splitlines()
            return Outcome(Finding(f"a rank failed: {lines[-1][:80]}", len(program) - 1, str(failure)))
        return next((each for each in outcomes if each.finding is not None), outcomes[0])

    def stop(self) -> None:
        self._ranks.stop()


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


def fuzz(cases: Iterable[Case], minutes: float, ranks: int) -> Tally:
    """Play cases for some minutes; print each finding, made small."""
    tally, player = Tally(), Player(ranks)
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
    switches += f" --ranks {case.ranks} --{'engine' if case.engine else 'one-line'}"
    return f"""\
---- seed {case.seed}{switches}: {found.kind}
{found.details}
{script_of(case, program)}
"""


def script_of(case: Case, program: list[str]) -> str:
    """A script that runs the program on both sides: with ``tests`` on the path, or by ``--replay``."""
    lines = "\n\n".join(program)
    return f'''\
from fuzz.playing import Player

PROGRAM = """\\
{lines}
"""
if __name__ == "__main__":
    print(Player({case.ranks})(PROGRAM.split("\\n\\n"), compare_states={case.compare_states}).finding)'''


def replay(file: Path) -> None:
    """Run a script that :func:`script_of` printed."""
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})
