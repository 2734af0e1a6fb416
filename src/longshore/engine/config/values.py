"""Kinds of configuration values: one definition for files, for ``Config`` and for the documentation."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BeforeValidator

from longshore.byte_sizes import MemoryBudget, parse_memory_budget
from longshore.engine.config.names import nearest, quoted


class WrongValueError(ValueError):
    """Says what a value must be; whoever catches it knows the path and the value."""


class Kind(ABC):
    """One kind of value: what it says about itself, and how a given value is read."""

    @abstractmethod
    def says(self) -> str:
        """Describe legal values, to follow "must be"."""

    @abstractmethod
    def check(self, value: object) -> Any:
        """The value as longshore keeps it.

        Raises:
            WrongValueError: it is something else.
        """

    def wrong(self) -> WrongValueError:
        return WrongValueError(f"must be {self.says()}")


def checked(kind: Kind) -> BeforeValidator:
    """For a field of a model. None is passed on: whether it may be None is the annotation's to say."""
    return BeforeValidator(partial(_read, kind))


def _read(kind: Kind, value: object) -> Any:
    return None if value is None else kind.check(value)


def kind_of(metadata: Sequence[object]) -> Kind | None:
    """The kind that a field of a model was :func:`checked` by, from its metadata."""
    for entry in metadata:
        if isinstance(entry, BeforeValidator) and isinstance(entry.func, partial):
            return entry.func.args[0]
    return None


@dataclass(frozen=True)
class Boolean(Kind):
    def says(self) -> str:
        return "true or false"

    def check(self, value: object) -> bool:
        # 0, 1 and "true" are refused: a file that has them was written for some other key.
        if not isinstance(value, bool):
            raise self.wrong()
        return value


@dataclass(frozen=True)
class Integer(Kind):
    """Floats are integers when they are whole: JSON writers turn 500000000 into 5e8. ``of``: what it counts."""

    minimum: int | None = None
    maximum: int | None = None
    of: str = ""

    def says(self) -> str:
        of = f" ({self.of})" if self.of else ""
        if self.minimum is not None and self.maximum is not None:
            return f"an integer from {self.minimum} to {self.maximum}{of}"
        return "an integer" + (f" of at least {self.minimum}" if self.minimum is not None else "") + of

    def check(self, value: object) -> int:
        whole = _whole(value)
        if whole is None or (self.minimum is not None and whole < self.minimum):
            raise self.wrong()
        if self.maximum is not None and whole > self.maximum:
            raise self.wrong()
        return whole


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(number := float(value)) and number.is_integer():
        return int(number)
    return None


@dataclass(frozen=True)
class Number(Kind):
    """A finite number. ``above`` and ``below`` are bounds that it may not reach; ``of`` says what it measures."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    of: str = ""

    def says(self) -> str:
        bounds = [
            (self.minimum, "of at least"),
            (self.above, "above"),
            (self.maximum, "at most"),
            (self.below, "below"),
        ]
        said = " and ".join(f"{words} {bound:g}" for bound, words in bounds if bound is not None)
        return " ".join(part for part in ("a number", said, f"({self.of})" if self.of else "") if part)

    def check(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self.wrong()
        try:
            number = float(value)
        except OverflowError:  # an integer of more digits than a double has range
            raise self.wrong() from None
        inside = (
            math.isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.above is None or number > self.above)
            and (self.maximum is None or number <= self.maximum)
            and (self.below is None or number < self.below)
        )
        if not inside:
            raise self.wrong()
        return number


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few; strings in any case.

    Attributes:
        options: the legal values.
        refused: others that are known (strings in lower case), with what to do instead.
        otherwise: what to do about any other.
    """

    options: tuple[str | int, ...]
    refused: Mapping[str | int, str] = field(default_factory=dict)
    otherwise: str = ""

    def says(self) -> str:
        return f"one of {', '.join(quoted(option) for option in self.options)}"

    def check(self, value: object) -> str | int:
        given = value.lower() if isinstance(value, str) else _whole(value)
        if given is not None:
            for option in self.options:
                if given == (option.lower() if isinstance(option, str) else option):
                    return option
            if given in self.refused:
                raise WrongValueError(f"is not supported: {self.refused[given]}")
        near = nearest(value, [option for option in self.options if isinstance(option, str)])
        raise WrongValueError(f"must be {self.says()}{near}" + (f"; {self.otherwise}" if self.otherwise else ""))


_DTYPE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}


@dataclass(frozen=True)
class Dtype(Kind):
    """A floating dtype by any of its names, or the torch dtype itself."""

    options: tuple[str, ...] = ("fp32", "bf16", "fp16")

    def says(self) -> str:
        return f"one of {', '.join(quoted(option) for option in self.options)} (or torch's name for it)"

    def check(self, value: object) -> str:
        kind = type(value)
        # By name: torch is not imported for reading a file.
        if (kind.__module__, kind.__name__) == ("torch", "dtype"):
            value = str(value)
        if isinstance(value, str):
            for option in self.options:
                if value.lower() in _DTYPE_NAMES[option]:
                    return option
        raise self.wrong()


@dataclass(frozen=True)
class String(Kind):
    def says(self) -> str:
        return "a string"

    def check(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong()
        return value


@dataclass(frozen=True)
class Budget(Kind):
    """A budget of memory: a percentage, bytes, or ``"auto"``."""

    def says(self) -> str:
        return '"auto", a percentage ("25%"), a size ("8GiB"), or an integer number of bytes; 0: none'

    def check(self, value: object) -> int | str:
        try:
            budget = parse_memory_budget(value)
        except ValueError as error:
            raise WrongValueError(str(error)) from None
        assert isinstance(value, (int, str))
        return "auto" if budget == MemoryBudget() else value


@dataclass(frozen=True)
class Items(Kind):
    """A list; ``count`` if it must have so many."""

    of: Kind
    count: int | None = None

    def says(self) -> str:
        return ("a list" if self.count is None else f"a list of {self.count}") + f", each {self.of.says()}"

    def check(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or (self.count is not None and len(value) != self.count):
            raise self.wrong()
        try:
            return tuple(self.of.check(item) for item in value)
        except WrongValueError:
            raise self.wrong() from None


@dataclass(frozen=True)
class Either(Kind):
    """The first kind that fits."""

    kinds: tuple[Kind, ...]

    def says(self) -> str:
        return ", or ".join(kind.says() for kind in self.kinds)

    def check(self, value: object) -> Any:
        for kind in self.kinds:
            try:
                return kind.check(value)
            except WrongValueError:
                continue
        raise self.wrong()


@dataclass(frozen=True)
class Block(Kind):
    """A section that is judged as a whole: does it switch anything on?

    Attributes:
        switches: dotted names inside the section, with the values that mean off. None: only an empty section is off.
        on_when_absent: the section is on unless a switch says otherwise.
    """

    switches: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: {"enabled": (False,)})
    on_when_absent: bool = False

    def says(self) -> str:
        return "a section (an object), or false"

    def check(self, value: object) -> object:
        if not isinstance(value, (Mapping, bool)):
            raise self.wrong()
        return value

    def is_off(self, value: object) -> bool:
        if isinstance(value, bool) or value is None:
            return not value
        if not isinstance(value, Mapping) or not value:
            return isinstance(value, Mapping)
        if not self.switches:
            return False
        found = [(_dig(value, name), off) for name, off in self.switches.items()]
        given = [(state, off) for state, off in found if state is not None]
        if not given:
            return not self.on_when_absent
        return all(any(same(state, one) for one in off) for state, off in given)


def _dig(section: Mapping[Any, Any], dotted: str) -> object:
    value: object = section
    for name in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def same(left: object, right: object) -> bool:
    """Equal, and not ``True == 1``."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


BOOLEAN = Boolean()
TEXT = String()
AT_LEAST_0 = Integer(0)
AT_LEAST_1 = Integer(1)
NOT_NEGATIVE = Number(minimum=0)
POSITIVE = Number(above=0)
FRACTION = Number(minimum=0, maximum=1, of="a share: 0.9 for 90 %")
BETA = Number(minimum=0, below=1)
BETAS = Items(BETA, 2)
DTYPE = Dtype()
LOW_DTYPE = Dtype(("bf16", "fp16"))
STAGE = OneOf((0, 1, 2, 3))
DEVICE = OneOf(
    ("none", "cpu"), {"nvme": 'optimizer state on NVMe is not kept by longshore; use "cpu", whose state is sharded'}
)
SCALE_POWER = Integer(0, 127)
LARGEST_SCALE = 2.0**127
"""Losses are scaled in float32, in which the next power of two is infinite."""
LOSS_SCALE = Number(above=0, maximum=LARGEST_SCALE)
STATIC_SCALE = Number(minimum=0, maximum=LARGEST_SCALE)
"""0: dynamic."""
PER_GROUP = Either((NOT_NEGATIVE, Items(NOT_NEGATIVE)))
"""One for all parameter groups, or a list with one for each."""
WRAP_POLICY = Either((OneOf(("auto",)), Integer(1, of="elements"), Items(TEXT)))
"""Modules that are gathered as a whole at stage 3."""
SPECULATION_MEMORY = Budget()
"""100 % is what a spare for every tile takes."""

Choice = OneOf
"""The name by which ``optimizers.py`` still knows it."""
