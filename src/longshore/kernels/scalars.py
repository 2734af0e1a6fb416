"""What a rule's element-wise pass reads, for kernels that take it as a row of float32 numbers.

Computed in double and rounded once, as in :mod:`longshore.kernels.reference`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.kernels.reference import scalars_of
from longshore.kernels.rules import AdagradRule, AdamRule, HostRule, LionRule, Rule, Scale, SGDRule

COLUMNS = 11
"""Of the longest row. The first two are what the gradient is multiplied by, one after the other."""


class RuleKind(NamedTuple):
    """What all rules of one type have in common."""

    code: int
    name: str
    least_arrays: int
    most_arrays: int


_KINDS: dict[type, RuleKind] = {
    AdamRule: RuleKind(1, "Adam", 3, 3),
    LionRule: RuleKind(2, "Lion", 2, 2),
    AdagradRule: RuleKind(3, "Adagrad", 2, 2),
    SGDRule: RuleKind(4, "SGD", 1, 2),
}


def kind_of(rules: Sequence[HostRule], page_arrays: int) -> RuleKind:
    """The kind of the rules of one call.

    Raises:
        ValueError: several kinds, an unknown one, pages that it cannot have, or
            a step count below 1.
    """
    kinds = {type(rule) for rule in rules}
    if len(kinds) > 1:
        raise ValueError(f"the rules of one call are of one kind, not {sorted(kind.__name__ for kind in kinds)}")
    of = kinds.pop() if kinds else AdamRule  # no rules: no segments, or an error of the table
    if of not in _KINDS:
        raise ValueError(f"the kernels do not step by a {of.__name__}")
    kind = _KINDS[of]
    for rule in rules:
        name, least = kind.name, kind.least_arrays
        if isinstance(rule, SGDRule) and rule.momentum != 0:
            name, least = "SGD with momentum", 2
        if not least <= page_arrays <= kind.most_arrays:
            has = f"{least}" if least == kind.most_arrays else f"{least} or {kind.most_arrays}"
            raise ValueError(f"a page of {page_arrays} arrays, and {name} has {has}")
        if isinstance(rule, (AdamRule, AdagradRule)) and rule.step < 1:
            raise ValueError("a step count below 1")
    return kind


def row_of(rule: Rule, scale: Scale) -> list[float]:
    """The row of one rule, in double."""
    row = [-scale.first if rule.maximize else scale.first, scale.second]
    if isinstance(rule, AdamRule):
        row += _adam(rule)
    elif isinstance(rule, LionRule):
        row += [1.0 - rule.lr * rule.weight_decay, rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, -rule.lr]
    elif isinstance(rule, AdagradRule):
        row += [rule.weight_decay, rule.eps, -(rule.lr / (1.0 + (rule.step - 1.0) * rule.lr_decay))]
    else:
        row += [rule.weight_decay, rule.momentum, 1.0 - rule.dampening, -rule.lr, rule.first, rule.nesterov]
    return row + [0.0] * (COLUMNS - len(row))


def _adam(rule: AdamRule) -> list[float]:
    scalars = scalars_of(rule)
    lerp_weight = struct.unpack("f", float32_bytes(scalars.lerp_weight))[0]
    # torch's lerp counts from the nearer end, so that a weight of 1 gives the
    # gradient exactly. The difference is exact in float32.
    from_gradient = not lerp_weight < 0.5
    return [
        scalars.decay,
        scalars.l2,
        lerp_weight - 1.0 if from_gradient else lerp_weight,
        float(from_gradient),
        scalars.beta2,
        scalars.one_minus_beta2,
        scalars.root_bias_correction2,
        scalars.eps,
        scalars.negative_step_size,
    ]


def float32_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Doubles rounded to float32, on the CPU: ``[len(rows), columns]``."""
    data = bytearray(b"".join(float32_bytes(value) for row in rows for value in row))
    return torch.frombuffer(data, dtype=torch.float32).view(len(rows), -1)


def float32_bytes(value: float) -> bytes:
    """A double rounded to the nearest float32, in whatever float mode this thread is.

    The processor would make a denormal (a tiny eps, say) zero where
    ``torch.set_flush_denormal(True)`` was called.
    """
    if 0.0 < abs(value) < 2.0**-126:
        units = round(abs(value) * 2.0**149)  # of the smallest float32: exact, then half to even
        return struct.pack("I", units | (0x80000000 if value < 0 else 0))
    try:
        return struct.pack("f", value)
    except OverflowError:  # beyond the largest float32, which struct refuses
        return struct.pack("f", math.copysign(math.inf, value))
