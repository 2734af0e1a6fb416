"""Play random programs: ``python -m fuzz``, with ``tests`` on the path (``make fuzz``).

Each finding is printed with its seed and a script that reproduces it. With ``--seeds-of TEXT`` (``make fuzz-sample``:
the commit's hash) the programs depend on the text. ``--seed`` plays one program again, ``--show``
prints it, and ``--replay`` runs a printed script.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fuzz.generate import VOCABULARIES
from fuzz.playing import OF_THE_DEVICE, Case, fuzz, replay, script_of
from fuzz.vocabulary import SETS


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--minutes", type=float, default=1.0, help="until then programs are started")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="two: programs of an engine only")
    parser.add_argument("--seeds-of", metavar="TEXT", help="seeds that follow from a text; without it, fresh ones")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--engine", action="store_true", help="programs of longshore.initialize only")
    which.add_argument("--one-line", action="store_true", help="programs of an optimizer only")
    parser.add_argument("--words", type=_vocabularies, help=f"some of {', '.join(VOCABULARIES)}; without it, all")
    parser.add_argument("--simulated-device", action="store_true", help="programs of the simulated accelerator")
    parser.add_argument("--seed", type=int, help="play the program of this seed only")
    parser.add_argument("--show", action="store_true", help="print the program of --seed, and play nothing")
    parser.add_argument("--without", action="append", default=[], choices=SETS, help="a set of words that is not used")
    parser.add_argument("--replay", type=Path, help="a file with a printed script")
    arguments = parser.parse_args(words)
    possible = [each for each in VOCABULARIES if (each in OF_THE_DEVICE) is arguments.simulated_device]
    if arguments.words is None:
        arguments.words = possible
    if not set(arguments.words) <= set(possible):
        how = "with" if arguments.simulated_device else "without"
        parser.error(f"--words are some of {','.join(possible)} {how} --simulated-device")
    return arguments


def _vocabularies(text: str) -> list[str]:
    return text.split(",")


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    dice = random.SystemRandom() if arguments.seeds_of is None else random.Random(arguments.seeds_of)
    without = tuple(arguments.without)
    while True:
        seed = dice.randrange(1 << 32) if arguments.seed is None else arguments.seed
        engine = arguments.engine or arguments.ranks > 1 or (not arguments.one_line and seed % 4 < 2)
        yield Case(seed, without, arguments.ranks, engine, arguments.words[seed // 4 % len(arguments.words)])
        if arguments.seed is not None:
            return


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    torch.set_num_threads(1)
    if arguments.replay is not None:
        replay(arguments.replay)
        return 0
    cases = cases_of(arguments)
    if arguments.show:
        case = next(cases)
        print(script_of(case, case.program))
        return 0
    tally = fuzz(cases, arguments.minutes, arguments.ranks, "sim" if arguments.simulated_device else "cpu")
    print(tally)
    return 1 if tally.findings or not tally.steps else 0


if __name__ == "__main__":
    sys.exit(main())
