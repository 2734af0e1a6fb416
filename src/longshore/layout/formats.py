"""Formats of the states in a buffer: float32, bfloat16, or 8 bits; docs/states.md states their bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

BLOCK_NUMEL = 64
"""Elements of a parameter that share a scale in :attr:`StateFormat.EIGHT_BIT`: kBlock in native/kernels.inl."""

EIGHT_BIT_LEAST_NUMEL = 4096
"""Elements of the smallest parameter with states of 8 bits."""

NEVER_NEGATIVE = frozenset({"exp_avg_sq", "sum"})
"""States, by name, that are sums or averages of squares: their 8-bit codes have no sign."""


class StateFormat(Enum):
    """Format of the arrays of a buffer behind the master, which is float32 in each."""

    FP32 = "fp32"
    BF16 = "bf16"
    """bfloat16, rounded stochastically."""
    EIGHT_BIT = "8bit"
    """Codes of 8 bits: a small floating-point number each, relative to a power of two for 64 elements."""

    def __init__(self, _: str) -> None:
        self.code = len(type(self).__members__)
        """Number of the format in native/kernels.h."""

    @property
    def unit(self) -> int:
        """Number of elements of a parameter at whose multiples it may be divided between tiles or ranks."""
        return BLOCK_NUMEL if self is StateFormat.EIGHT_BIT else 1

    def state_words(self, numel: int) -> int:
        """Return the words of 4 bytes that one state of ``numel`` elements takes in a buffer."""
        if self is StateFormat.EIGHT_BIT:
            return -(-numel // 4) + -(-numel // BLOCK_NUMEL)
        return numel if self is StateFormat.FP32 else -(-numel // 2)

    def buffer_bytes(self, arrays: int, numel: int, own_master: bool = False) -> int:
        """Return the bytes of a buffer of a master and ``arrays - 1`` states of ``numel`` elements; ``own_master``: the
        master is elsewhere."""
        return 4 * ((0 if own_master else numel) + (arrays - 1) * self.state_words(numel))

    def of_parameter(self, shape: Sequence[int]) -> StateFormat:
        """Return the format of the states of a parameter, which depends on its shape alone, not on ranks: parameters
        that are small, or that a division of their first dimension may cut within a block, have no 8-bit states."""
        if self is not StateFormat.EIGHT_BIT:
            return self
        whole_blocks = math.prod(shape[1:]) % BLOCK_NUMEL == 0 and len(shape) > 1
        return self if whole_blocks and math.prod(shape) >= EIGHT_BIT_LEAST_NUMEL else StateFormat.BF16

    def coding_of(self, shape: Sequence[int], stream: int = 0) -> Coding:
        """Return how the states of a whole parameter of this shape are encoded; ``stream``: of its random bits."""
        format = self.of_parameter(shape)
        return FLOAT32_STATES if format is StateFormat.FP32 else Coding(format, stream)


def parse_state_format(value: object) -> StateFormat:
    """Return the format with this name.

    Raises:
        ValueError: there is none.
    """
    for each in StateFormat:
        if value is each or value == each.value:
            return each
    names = ", ".join(repr(each.value) for each in StateFormat)
    raise ValueError(f"states is the format of the optimizer's states, {names}, not {value!r}")


class Coding(NamedTuple):
    """How the states of some consecutive elements of a parameter are encoded."""

    format: StateFormat = StateFormat.FP32
    stream: int = 0
    """Number of the parameter's random bits; see :func:`stream_of`."""
    place: int = 0
    """Place of the first of the elements in the whole parameter."""

    def behind(self, offset: int) -> Coding:
        """Return the coding of the elements from ``offset`` on."""
        return self._replace(place=self.place + offset)


FLOAT32_STATES = Coding()


def stream_of(seed: int, name: str) -> int:
    """Return the number, of 64 bits, of the random bits of a parameter."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


MOST_SEED = 2**63 - 1
"""The largest ``states_seed``: with it and all below, down to 0, checkpoints can be written and read."""


def is_seed(seed: object) -> bool:
    """Return whether this is a number on which random bits can depend."""
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= MOST_SEED
