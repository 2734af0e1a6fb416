"""Elementwise optimizers of torch that have no kernel here and are run by torch on host tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.kernels import TorchRule, next_scalars
from longshore.optim.family import IMPLEMENTATION_FLAGS, History, RuleFamily, check_flags, number


class _States(NamedTuple):
    """What one of torch's optimizers keeps for each parameter, besides the step count."""

    arrays: tuple[str, ...]
    scalars: tuple[str, ...] = ()
    switches: Mapping[str, str] = {}
    """Arrays that only groups with a true value of this option have."""


ELEMENTWISE: Mapping[str, _States] = {
    "ASGD": _States(("ax",), ("eta", "mu")),
    "Adadelta": _States(("square_avg", "acc_delta")),
    "Adamax": _States(("exp_avg", "exp_inf")),
    "NAdam": _States(("exp_avg", "exp_avg_sq"), ("mu_product",)),
    "RAdam": _States(("exp_avg", "exp_avg_sq")),
    "RMSprop": _States(
        ("square_avg", "momentum_buffer", "grad_avg"), (), {"momentum_buffer": "momentum", "grad_avg": "centered"}
    ),
    "Rprop": _States(("prev", "step_size")),
}
"""Names in ``torch.optim``. What an element becomes depends on that element alone, its states and the step count."""


class TorchFamily(RuleFamily):
    """The rule of one of torch's elementwise optimizers.

    Args:
        kind: its name in ``torch.optim``; one of :data:`ELEMENTWISE`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        found = ELEMENTWISE[kind]
        self._switches = found.switches
        self.states = found.arrays
        self.optional_states = frozenset(found.switches)
        self.scalars = found.scalars
        torchs = getattr(torch.optim, kind)([torch.zeros(1, device="cpu")])
        self._options = tuple(name for name in torchs.defaults if name not in IMPLEMENTATION_FLAGS)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group)
        # torch's constructor checks the values.
        getattr(torch.optim, self.kind)([torch.zeros(1, device="cpu")], **dict(self._options_of(group)))

    def _options_of(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return tuple((name, _plain(group[name], name)) for name in self._options)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        return [name for name in self.states if name not in self._switches or group[self._switches[name]]]

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> TorchRule:
        return TorchRule(
            kind=self.kind,
            options=self._options_of(group),
            rows=tuple((name, arrays.index(name)) for name in self.states_of(group)),
            step=history.step + 1,
            first=not history.states,
            scalars=history.scalars,
        )

    def after(self, group: Mapping[str, Any], history: History) -> History:
        states = self.states_of(group)
        rule = self.rule_of(group, history, ["master", *states])
        after = super().after(group, history)
        return after._replace(scalars=next_scalars(rule, self.scalars)) if self.scalars else after


def _plain(value: Any, name: str) -> Any:
    """An option as it can be compared: tensors as numbers, lists as tuples."""
    if isinstance(value, Tensor):
        return number(value, name)
    return tuple(_plain(part, name) for part in value) if isinstance(value, (list, tuple)) else value
