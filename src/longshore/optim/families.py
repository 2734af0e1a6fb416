"""The rules that have kernels of their own: Adam and AdamW, Lion, Adagrad, SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from longshore.kernels import AdagradRule, AdamRule, LionRule, SGDRule
from longshore.optim.family import History, RuleFamily
from longshore.optim.hyperparameters import betas_of, check_flags, check_not_negative, scalar


class AdamFamily(RuleFamily):
    """Adam and AdamW, which differ in a group's ``decoupled_weight_decay``."""

    states = ("exp_avg", "exp_avg_sq")
    refused_states: ClassVar = {"max_exp_avg_sq": "the state is that of amsgrad=True, which is not supported"}

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group)
        check_not_negative(group, "lr", "eps", "weight_decay")
        betas_of(group)

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> AdamRule:
        beta1, beta2 = betas_of(group)
        return AdamRule(
            lr=scalar(group["lr"], "lr"),
            beta1=beta1,
            beta2=beta2,
            eps=scalar(group["eps"], "eps"),
            weight_decay=scalar(group["weight_decay"], "weight_decay"),
            step=history.step + 1,
            decoupled=bool(group["decoupled_weight_decay"]),
            maximize=bool(group["maximize"]),
            bias_correction=bool(group["bias_correction"]),
        )


class LionFamily(RuleFamily):
    """Lion, which torch does not have; its moment has the name that everybody gives it."""

    states = ("exp_avg",)
    needs_step = False

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group)
        check_not_negative(group, "lr", "weight_decay")
        betas_of(group)

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> LionRule:
        beta1, beta2 = betas_of(group)
        return LionRule(
            lr=scalar(group["lr"], "lr"),
            beta1=beta1,
            beta2=beta2,
            weight_decay=scalar(group["weight_decay"], "weight_decay"),
            maximize=bool(group["maximize"]),
        )


class AdagradFamily(RuleFamily):
    """Adagrad.

    Args:
        initial_accumulator_value: what sums begin with. torch reads it from the
            constructor alone, and ignores a group's own; here that is refused.
    """

    states = ("sum",)
    fixed_options = frozenset({"initial_accumulator_value"})

    def __init__(self, initial_accumulator_value: float) -> None:
        self._initial = initial_accumulator_value

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group)
        check_not_negative(group, "lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")
        found = group["initial_accumulator_value"]
        if found != self._initial:
            raise ValueError(
                f"initial_accumulator_value is {found} in a parameter group and {self._initial} in the optimizer: it "
                "is one value for all groups; pass it to the optimizer"
            )

    def initial(self, history: History) -> Mapping[str, float]:
        return {} if "sum" in history.states or not self._initial else {"sum": self._initial}

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> AdagradRule:
        return AdagradRule(
            lr=scalar(group["lr"], "lr"),
            lr_decay=scalar(group["lr_decay"], "lr_decay"),
            eps=scalar(group["eps"], "eps"),
            weight_decay=scalar(group["weight_decay"], "weight_decay"),
            step=history.step + 1,
            maximize=bool(group["maximize"]),
        )


class SGDFamily(RuleFamily):
    """SGD. Only groups with momentum have a state, and torch keeps no step count."""

    states = ("momentum_buffer",)
    optional_states = frozenset(states)
    keeps_step = False

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group)
        check_not_negative(group, "lr", "momentum", "weight_decay")
        dampening = scalar(group["dampening"], "dampening")
        if group["nesterov"] and not (scalar(group["momentum"], "momentum") > 0 and dampening == 0):
            raise ValueError(
                f"nesterov=True needs a momentum above 0 and no dampening, and they are {group['momentum']} and "
                f"{group['dampening']}"
            )

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        return self.states if scalar(group["momentum"], "momentum") != 0 else ()

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> SGDRule:
        return SGDRule(
            lr=scalar(group["lr"], "lr"),
            momentum=scalar(group["momentum"], "momentum"),
            dampening=scalar(group["dampening"], "dampening"),
            weight_decay=scalar(group["weight_decay"], "weight_decay"),
            nesterov=bool(group["nesterov"]),
            first="momentum_buffer" not in history.states,
            maximize=bool(group["maximize"]),
        )
