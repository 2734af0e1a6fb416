"""A random program of a seed: how it begins, and what a script does then."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from fuzz.beginnings import BEGINNINGS
from fuzz.chains import chain
from fuzz.files import config_file
from fuzz.vocabulary import WORDS, Facts

_FAIL_IN_TORCH = {
    # It makes its states in the constructor only; longshore's has none before the first step.
    "Adagrad": (
        "del o.state",
        "state.pop",
        "state.clear",
        "in o.state",
        "['state'][0]",
        "params'].pop()",
        "sd = o.state",
    ),
    "RMSprop": ("OneCycleLR", "momentum"),  # it has no buffer where momentum comes later
}


WHOLE: dict[str, Callable[[random.Random, int], list[str]]] = {"chains": chain, "files": config_file}
"""Vocabularies whose programs are not a beginning and any words after it."""

VOCABULARIES = (*BEGINNINGS, *WHOLE)

_OF_STREAMS = (
    *("backward", "threads", "closures", "frozen", "gradients", "torch's norm", "clipping", "hooks", "groups"),
    *("members", "data", "state", "state edits", "saving", "schedulers"),
)
"""Sets that streamed models have, too."""


def program_of(
    seed: int, without: Collection[str] = (), engine: bool = False, words_of: str = "scripts", ranks: int = 1
) -> list[str]:
    """The statements of the seed.

    Args:
        seed: of the dice.
        without: sets of words that are not used.
        engine: whether it is a program of an engine.
        words_of: one of :data:`VOCABULARIES`.
        ranks: the most that a chain of checkpoints goes over.
    """
    dice = random.Random(seed)
    if words_of in WHOLE:
        return WHOLE[words_of](dice, ranks)
    facts, lines = BEGINNINGS[words_of](dice, engine)
    always, step = ("engine", "e.step()") if engine else ("training", "o.step()")
    words = [each for each in WORDS if each.of not in (*without, *facts.left_out) and _says(each.of, words_of, engine)]
    # Scripts of one kind use few sets of words, often: more of what they do meets.
    sets = sorted({each.of for each in words} - {always})
    chosen = {always, *dice.sample(sets, min(len(sets), dice.choice([1, 2, 2, 3, 4, len(sets)])))}
    words = [each for each in words if each.of in chosen]
    weights = [each.weight * (0.4 if each.of == always else 1) for each in words]
    for _ in range(dice.choice([4, 8, 12, 20, 30]) // (1 + (words_of == "streams"))):  # whose device is slow
        if dice.random() < 0.35:
            backward = f"e.backward({facts.call()})" if engine else f"{facts.loss()}.backward()"
            lines += [backward] * dice.choice([1, 1, 2])
            lines += _any(facts, words, weights) if dice.random() < 0.5 else []
            lines += [step, *(["o.zero_grad()"] if dice.random() < 0.7 and not engine else [])]
        else:
            lines += _any(facts, words, weights)
    return [*lines, "e.backward(e(0))" if engine else "m(0).backward()", step]


def _says(of: str, words_of: str, engine: bool) -> bool:
    """Whether a set of words says something in programs of this vocabulary."""
    if words_of == "streams":
        return (
            of.startswith("engine") if engine else of.startswith(("training", "stream", "device")) or of in _OF_STREAMS
        )
    others = ("stream", "engine stream", *(() if words_of == "device" else ("device", "engine device")))
    return of.startswith("engine") is engine and not of.startswith(others)


def _any(facts: Facts, words: Any, weights: list[float]) -> list[str]:
    text = facts.dice.choices(words, weights)[0].write(facts)
    if not facts.alone and "nothing() if rank" in text.replace("if rank else nothing()", "nothing() if rank"):
        return []
    return text.split("\n\n") if text and not any(each in text for each in _FAIL_IN_TORCH.get(facts.kind, ())) else []
