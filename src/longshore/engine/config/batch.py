"""Batch arithmetic: train batch = micro batch x accumulation steps x ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

from longshore.engine.config.values import MOST_INTEGER


class BatchNumbers(NamedTuple):
    """Samples in a step over all ranks, samples in a backward on one rank, and backwards in a step. None: not given."""

    train: int | None
    micro: int | None
    steps: int | None


class Names(NamedTuple):
    """Names of the three numbers in the user's file or arguments."""

    train: str
    micro: str
    steps: str


OURS = Names("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
_MOST_TRIES = 1 << 16


def resolve(given: BatchNumbers, world_size: int | None, names: Names = OURS) -> BatchNumbers:
    """Compute all three numbers from those that are given; by default a micro batch is 1 sample and a step 1 backward.

    While the number of ranks is not known (``world_size`` None), the numbers are checked and returned as they are.

    Raises:
        ValueError: the numbers contradict each other (the message says which to change, and to what), or
            ``world_size`` is not a number of ranks.
    """
    train, micro, steps = given
    if world_size is None:
        if train is not None and train % ((micro or 1) * (steps or 1)):
            raise ValueError(_does_not_multiply(given, None, names))
        return given
    check_world_size(world_size)
    if train is None:
        micro, steps = micro or 1, steps or 1
        train = micro * steps * world_size
        if train > MOST_INTEGER:
            raise ValueError(
                f"is {names.micro} {micro} x {names.steps} {steps} x {world_size} ranks = {train}, and integers have "
                "at most 64 bits; lower one of them"
            )
        return BatchNumbers(train, micro, steps)
    if micro is None:
        steps = steps or 1
        micro, rest = divmod(train, steps * world_size)
    elif steps is None:
        steps, rest = divmod(train, micro * world_size)
    else:
        rest = train - micro * steps * world_size
    if rest:
        raise ValueError(_does_not_multiply(given, world_size, names))
    return BatchNumbers(train, micro, steps)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless ``world_size`` is a number of ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is a number of ranks, at least 1, not {world_size!r}")


def _does_not_multiply(given: BatchNumbers, world_size: int | None, names: Names) -> str:
    """Describe the rule, the numbers, and each change of one number that corrects them."""
    train, micro, steps = given
    assert train is not None
    factors = [(name, number) for name, number in ((names.micro, micro), (names.steps, steps)) if number is not None]
    product = math.prod([number for _, number in factors]) * (world_size or 1)
    said = [f"{name} {number}" for name, number in factors]
    if world_size is not None:
        said.append(f"{world_size} rank{'s' if world_size > 1 else ''}")
    exact = len(factors) == 2 and world_size is not None
    relation = "is not" if exact else "is not a multiple of"
    below = train // product * product
    fits = (product,) if exact or not below else (below, below + product)
    ways = [f"{names.train} to {' or '.join(map(str, fits))}"]
    for name, number in factors:
        best, rest = divmod(train, product // number)
        if rest == 0:
            if not exact:  # Another number is computed from this one, so any divisor is valid: the nearest below.
                most = min(best, number)
                divisors = (divisor for divisor in range(most, max(0, most - _MOST_TRIES), -1) if best % divisor == 0)
                best = next(divisors, None)  # of numbers with many digits there may be none that is near
            if best is not None:
                ways.append(f"{name} to {best}")
    return (
        f"must be {names.micro} x {names.steps} x ranks, and {train} {relation} {' x '.join(said)} = {product}; "
        f"change {', or '.join(ways)}"
    )
