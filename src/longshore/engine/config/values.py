"""Kinds of configuration values: one definition for files, for ``Config`` and for the documentation."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from longshore.byte_sizes import MemoryBudget, parse_memory_budget
from longshore.engine.config.base import nearest, quoted


class WrongValueError(ValueError):
    """An illegal value. The message says which are legal; the code that catches it adds the path and the value."""


class Kind(ABC):
    """One kind of value: how legal values are described, and how a given value is checked.

    In the annotation of a model's field, as in ``Annotated[int, AT_LEAST_1]``, it checks the value that the model is
    given. None is not checked: the type in the annotation decides whether the field may be None.
    """

    @abstractmethod
    def says(self) -> str:
        """Describe legal values, to follow "must be"."""

    @abstractmethod
    def read(self, value: object) -> Any:
        """Return the value as longshore keeps it. If illegal, return None, or raise WrongValueError to say more."""

    def hint(self, value: object) -> str:
        """Return the rest of the message about an illegal value, such as a similar name."""
        return ""

    def converted(self, value: object) -> Any:
        """Return the legal value that an illegal one stands for in files that other programs convert, as 1 and "true"
        stand for true and "0.1" for 0.1; None if it stands for none."""
        return None

    def check(self, value: object) -> Any:
        """Return the value as longshore keeps it.

        Raises:
            WrongValueError: the value is illegal.
        """
        found = self.read(value)
        if found is None:
            hint = self.hint(value)
            raise WrongValueError(f"must be {self.says()}{hint}")
        return found

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: None if value is None else self.check(value), handler(source)
        )


def kind_in(metadata: Iterable[object]) -> Kind:
    """Return the kind in the metadata of a model's field. A field without one is a flag."""
    return next((entry for entry in metadata if isinstance(entry, Kind)), BOOLEAN)


@dataclass(frozen=True)
class Exactly(Kind):
    """A value of exactly one type, without conversion."""

    of: type
    words: str

    def says(self) -> str:
        return self.words

    def read(self, value: object) -> Any:
        return value if isinstance(value, self.of) else None

    def converted(self, value: object) -> bool | None:
        if self.of is not bool or isinstance(value, bool):
            return None
        word = value.strip().lower() if isinstance(value, str) else _number(value, whole=True)
        return next((state for state, words in _BOOLEANS.items() if word in words), None)


_BOOLEANS: dict[bool, tuple[object, ...]] = {
    True: (1, "1", "true", "yes", "on", "t", "y"),
    False: (0, "0", "false", "no", "off", "f", "n"),
}
"""What pydantic, by which DeepSpeed reads most of its sections, takes for a boolean."""

_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("below", operator.lt),
}


@dataclass(frozen=True)
class Number(Kind):
    """A finite number within bounds; ``above`` and ``below`` are exclusive.

    Attributes:
        of: the thing that it measures or counts.
        whole: whether it is an integer of 64 bits. Whole floats are integers too: JSON writers turn 500000000 into 5e8.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    of: str = ""
    whole: bool = False

    def _bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        return [(*how, bound) for name, how in _BOUNDS.items() if (bound := getattr(self, name)) is not None]

    def says(self) -> str:
        bounds = " and ".join(f"{words} {bound:g}" for words, _, bound in self._bounds())
        kind, of = "an integer" if self.whole else "a number", f"({self.of})" if self.of else ""
        return " ".join(part for part in (kind, bounds, of) if part)

    def read(self, value: object) -> float | None:
        number = _number(value, self.whole)
        inside = number is not None and all(holds(number, bound) for _, holds, bound in self._bounds())
        return number if inside else None

    def hint(self, value: object) -> str:
        is_number = isinstance(value, numbers.Real) and value == value  # NaN is none
        if not is_number or (self.whole and _has_64_bits(value)):
            return ""
        if self.whole:
            return "; it is more than 2**63 - 1"
        return "; it is more than a float can be" if abs(value) > sys.float_info.max else ""  # pyright: ignore

    def converted(self, value: object) -> float | None:
        return self.read(_quoted_number(value))


def _quoted_number(value: object) -> float | None:
    """Return the number in a string; None if there is none."""
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return None


MOST_INTEGER = 2**63 - 1
"""The largest integer of 64 bits: torch, NumPy and the native code have no larger ones."""


def _has_64_bits(value: Any) -> bool:
    return -MOST_INTEGER <= value <= MOST_INTEGER


def _number(value: object, whole: bool) -> float | None:
    """Return a finite number, as an int if ``whole``; None if the value is not one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or (whole and not _has_64_bits(value)):
        return None
    if whole and isinstance(value, numbers.Integral):
        return int(value)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a double
        return None
    if not math.isfinite(number) or (whole and not number.is_integer()):
        return None
    return int(number) if whole else number


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few options; strings are compared without case.

    Attributes:
        options: the legal values.
        refused: known values that are not supported (strings in lower case), with the remedy.
        otherwise: the remedy for any other value.
        aliases: other names (in lower case) and the options that they stand for.
    """

    options: tuple[str | int, ...]
    refused: Mapping[str | int, str] = field(default_factory=dict)
    otherwise: str = ""
    aliases: Mapping[str | int, str] = field(default_factory=dict)

    def says(self) -> str:
        return f"one of {', '.join(map(quoted, self.options))}" + (" (or torch's name for it)" if self.aliases else "")

    def read(self, value: object) -> str | int | None:
        given = _folded(value)
        given = self.aliases.get(given, given)
        return next((option for option in self.options if _folded(option) == given), None)

    def check(self, value: object) -> Any:
        if (given := _folded(value)) in self.refused:
            raise WrongValueError(f"is not supported: {self.refused[given]}")
        return super().check(value)

    def converted(self, value: object) -> str | int | None:
        number = _quoted_number(value)
        return None if number is None else self.read(number)

    def hint(self, value: object) -> str:
        # Names of different dtypes are similar, so none is suggested.
        near = "" if self.aliases else nearest(value, [option for option in self.options if isinstance(option, str)])
        return near + (f"; {self.otherwise}" if self.otherwise else "")


def _folded(value: object) -> Any:
    """Return an option for comparisons: a string in lower case or a whole number; None for anything else."""
    # A torch dtype is recognized by name, so that reading a file does not import torch.
    if isinstance(value, Enum):  # DeepSpeed's own names of devices are strings, too
        value = value.value
    if isinstance(value, str) or (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value).lower()
    return _number(value, whole=True)


@dataclass(frozen=True)
class Budget(Kind):
    """A budget of memory: a percentage, bytes, or ``"auto"``."""

    def says(self) -> str:
        return '"auto", a percentage ("25%"), a size ("8GiB"), or an integer number of bytes; 0: none'

    def read(self, value: object) -> Any:
        try:
            return "auto" if parse_memory_budget(value) == MemoryBudget() else value
        except ValueError as error:
            raise WrongValueError(str(error)) from None  # whose message is more precise than says()


@dataclass(frozen=True)
class Items(Kind):
    """A list; with ``count``, a list of that length."""

    of: Kind
    count: int | None = None

    def says(self) -> str:
        return ("a list" if self.count is None else f"a list of {self.count}") + f", each {self.of.says()}"

    def hint(self, value: object) -> str:
        return next(filter(None, map(self.of.hint, value)), "") if isinstance(value, (list, tuple)) else ""

    def read(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, (list, tuple)) or len(value) != (len(value) if self.count is None else self.count):
            return None
        found = tuple(self.of.read(item) for item in value)
        return None if None in found else found

    def converted(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, (list, tuple)):
            return None
        return self.read([item if self.of.read(item) is not None else self.of.converted(item) for item in value])


@dataclass(frozen=True)
class Either(Kind):
    """A value of one of several kinds, read by the first that fits."""

    kinds: tuple[Kind, ...]

    def says(self) -> str:
        return ", or ".join(kind.says() for kind in self.kinds)

    def hint(self, value: object) -> str:
        return next((hint for kind in self.kinds if (hint := kind.hint(value))), "")

    def read(self, value: object) -> Any:
        return next((found for kind in self.kinds if (found := kind.read(value)) is not None), None)

    def converted(self, value: object) -> Any:
        return next((found for kind in self.kinds if (found := kind.converted(value)) is not None), None)


@dataclass(frozen=True)
class Infinite(Kind):
    """Positive infinity, by which DeepSpeed's users say "never"; JSON has no such number, but Python's dicts do."""

    def says(self) -> str:
        return "infinity (in a dict: never)"

    def read(self, value: object) -> float | None:
        return math.inf if isinstance(value, float) and value == math.inf else None

    def converted(self, value: object) -> float | None:
        return self.read(_quoted_number(value))


@dataclass(frozen=True)
class Splits(Kind):
    """Which parameters hold several matrices, by patterns of names, as :func:`longshore.muon_groups` takes it."""

    def says(self) -> str:
        return (
            "a section of patterns of parameter names, each with a number of blocks (3), their sizes ([64, 16, 16]), "
            '"stack", null for one matrix, or {"split": 3, "split_dim": 1}'
        )

    def read(self, value: object) -> Mapping[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        fine = all(isinstance(pattern, str) and self._is_one(how) for pattern, how in value.items())
        return {pattern: self._plain(how) for pattern, how in value.items()} if fine else None

    def _is_one(self, how: object) -> bool:
        if isinstance(how, Mapping):
            dims = how.get("split_dim", 0)
            return {"split"} <= {*how} <= {"split", "split_dim"} and dims in (0, 1) and self._is_split(how["split"])
        return self._is_split(how)

    def _is_split(self, split: object) -> bool:
        return split in (None, "stack") or any(kind.read(split) is not None for kind in (AT_LEAST_1, _SIZES))

    def _plain(self, how: object) -> Any:
        """Return it with whole numbers as integers."""
        if isinstance(how, Mapping):
            return {"split": self._plain(how["split"]), "split_dim": int(how.get("split_dim", 0))}
        found = next((kind.read(how) for kind in (AT_LEAST_1, _SIZES) if kind.read(how) is not None), how)
        return list(found) if isinstance(found, tuple) else found


BOOLEAN = Exactly(bool, "true or false")
TEXT = Exactly(str, "a string")
AT_LEAST_0 = Number(0, whole=True)
AT_LEAST_1 = Number(1, whole=True)
_SIZES = Items(AT_LEAST_1)
SPLITS = Splits()
NOT_NEGATIVE = Number(minimum=0)
POSITIVE = Number(above=0)
FRACTION = Number(minimum=0, maximum=1, of="a share: 0.9 for 90 %")
BETA = Number(minimum=0, below=1)
_DTYPE_NAMES: dict[str | int, str] = {
    **dict.fromkeys(("float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "fp16"),
}
DTYPE = OneOf(("fp32", "bf16", "fp16"), aliases=_DTYPE_NAMES)
LOW_DTYPE = OneOf(("bf16", "fp16"), aliases=_DTYPE_NAMES)
LARGEST_SCALE = 2.0**127
"""The largest loss scale: losses are scaled in float32, in which the next power of two is infinite."""
