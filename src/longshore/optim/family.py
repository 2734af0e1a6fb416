"""Description of an optimizer's rule: options of a parameter group, names of states, and the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from functools import cached_property, partial
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longshore.kernels import HostRule, OneElement, Rule, TorchRule, next_scalars, torch_options
from longshore.layout.formats import StateFormat
from longshore.layout.tiles import MatrixLayout


class History(NamedTuple):
    """Values on which a parameter's next step depends besides its group, its arrays and its gradient."""

    step: int = 0
    """Number of applied steps of this parameter. Nothing else counts them (law 3)."""
    states: frozenset[str] = frozenset()
    """The state arrays that have values; others count as never written."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, besides the step count."""


# -- options of a parameter group ---------------------------------------------
# Each function below reads one option: it returns the value as plain Python numbers, or raises.


def number(value: Any, name: str) -> float:
    """Read a number (NumPy's, too) or a tensor of one element; raises ValueError for a larger tensor, TypeError for
    anything else."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor has one element, not {value.numel()}")
        return float(value.item())
    if isinstance(value, str):
        raise TypeError(f"{name} is a number, not the text {value!r}; YAML reads 1e-3 as text, and 1.0e-3 as a number")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a number or a one-element tensor, not {type(value).__name__}")
    return float(value)


def not_negative(value: Any, name: str) -> float:
    """Read a :func:`number` of at least 0."""
    found = number(value, name)
    if not found >= 0.0:
        raise ValueError(f"{name} must be a number of at least 0, and is {found}")
    return found


def beta(value: Any, name: str) -> float:
    """Read a decay rate: a :func:`number` of at least 0 and below 1."""
    found = number(value, name)
    if not 0.0 <= found < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, and is {found}")
    return found


def betas(value: Any, name: str) -> tuple[float, float]:
    """Read a pair of decay rates, which are both numbers or, as in torch, both tensors: a tuple, a list, or any other
    sequence of two."""
    try:
        if isinstance(value, (str, bytes, Mapping, Set)):
            raise TypeError
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} is a pair, not {value!r}") from None
    if isinstance(first, Tensor) != isinstance(second, Tensor):
        raise ValueError(f"{name} must be two numbers or two tensors, and is {value!r}")
    return beta(first, f"{name}[0]"), beta(second, f"{name}[1]")


def flag(value: Any, name: str) -> bool:
    """Read any value as a bool."""
    return bool(value)


_REFUSED = {
    "amsgrad": "the maximum of second moments is not kept; use amsgrad=False",
    "capturable": "a step that runs on the host cannot be captured in a CUDA graph; use capturable=False",
    "differentiable": "autograd cannot see a step that runs on the host; use differentiable=False",
}

IMPLEMENTATION_FLAGS = {"foreach": None, "fused": True, "capturable": False, "differentiable": False}
"""Options that say how a step is computed, not what it computes. They are never taken from a loaded state. ``fused`` is
True, so that torch's optimizer of the same name, which takes it from the state that it loads, continues with the same
bits."""

_NO_GROUP_OPTIONS = frozenset({"self", "__class__", "params", "release_gradients", "offload"})


def _wishes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``foreach`` and ``fused`` are in every group, whatever users pass: they wish for how a step is
    computed, not for what."""
    return {name: IMPLEMENTATION_FLAGS[name] for name in ("foreach", "fused") if name in options}


# -- families -----------------------------------------------------------------


class RuleFamily:
    """The rules of one optimizer: the options of its groups, and the names of its states.

    Groups and states have the names that ``torch.optim`` gives them.
    """

    options: ClassVar[Mapping[str, Callable[[Any, str], Any]]] = {}
    """Options of a group that determine the rule, with the function that reads each."""
    absent: ClassVar[Mapping[str, Any]] = {}
    """Options that torch's groups do not have, with the value that counts in a group that lacks one. Groups have them
    only if some group has another value, so that torch's distributed checkpoints fit."""
    rule: ClassVar[type[Rule]]
    """The rule. Its fields are read from options of the same names (``beta1`` and ``beta2`` from ``betas``), the step
    count and :meth:`more_fields`."""
    states: tuple[str, ...]
    """All state arrays that a rule may have, in the order in which it reads them from a state buffer."""
    optional_states: frozenset[str] = frozenset()
    """The states that a parameter may lack even after a step."""
    scalars: tuple[str, ...] = ()
    """States that are one number, besides the step count."""
    keeps_step: bool = True
    """Whether ``"step"`` is part of the state."""
    needs_step: bool = True
    """Whether a loaded state without ``"step"`` is refused."""
    refused_states: ClassVar[Mapping[str, str]] = {}
    """Entries of a loaded state that are not supported, with the reason."""
    initial_states: ClassVar[Mapping[str, str]] = {}
    """State arrays that are not zero before a parameter's first step, and the option with the number that fills each.
    These options have one value for all groups, which is read when the optimizer is built and never again."""

    matrix_state: ClassVar[str | None] = None
    """The one state of parameters that are matrices; None: this family has none."""

    encodable: ClassVar[bool] = True
    """Whether the states may be in another format than float32."""

    layout_options: ClassVar[tuple[str, ...]] = ()
    """Options that say how a parameter is laid out. They are the optimizer's own, never those of a loaded state."""

    def __init__(self, **fixed: Any) -> None:
        self._fixed = {name: self.options[name](value, name) for name, value in fixed.items()}

    def of(self, group: Mapping[str, Any]) -> RuleFamily:
        """Return the family of the parameters of a group."""
        return self

    def matrix_layout(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> MatrixLayout | None:
        """Return how a parameter of this group and shape is divided into matrices; None: its elements are stepped one
        by one. Raise ValueError, with a message that follows the parameter's name, if it cannot be stepped."""
        return None

    def encode_states(self, format: StateFormat) -> None:
        """Prepare for states in this format: the step count, on which random bits depend, is then part of each state.

        Raises:
            ValueError: they cannot be in this format.
        """
        if format is StateFormat.FP32:
            return
        if not self.encodable:
            raise ValueError(
                f"states={format.value!r} is for Adam, AdamW, Lion, SGD with momentum and Adagrad, and this optimizer "
                "has other states, which stay float32: leave states out"
            )
        self.keeps_step = True

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Names of all entries that a parameter's state may have. Entries with other names are the user's."""
        return (*(("step",) if self.keeps_step else ()), *self.states, *self.scalars, "master")

    def values_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group's options as plain numbers.

        Raises:
            ValueError: a value is out of range, or two contradict each other.
            TypeError: a value is not a number.
        """
        group = {**self.absent, **group}
        values = {name: read(group[name], name) for name, read in self.options.items()}
        self.check_together(values)
        return values

    @staticmethod
    def check_together(values: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for options that contradict each other."""
        return  # most rules have none

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Check a group's options.

        Raises:
            ValueError: an option is not supported, or a value is out of range; the message names it.
            TypeError: a value is not a number.
        """
        for name, why in _REFUSED.items():
            if group.get(name):
                raise ValueError(f"{name}={group[name]} is not supported: {why}")
        self.values_of(group)
        for name, value in self._fixed.items():
            if group[name] != value:
                raise ValueError(
                    f"{name} is {group[name]} in a parameter group and {value} in the optimizer: it is one value for "
                    "all groups; pass it to the optimizer"
                )

    def check_step(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for options that were put into a group since it was made, and that the rule does not
        read."""
        return

    @classmethod
    def group_options(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of groups, from ``locals()`` of an optimizer's constructor."""
        return {
            name: value
            for name, value in {**arguments, **_wishes(arguments)}.items()
            if name not in _NO_GROUP_OPTIONS and not (name in cls.absent and value is cls.absent[name])
        }

    @classmethod
    def complete(cls, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        """Give groups, the last of which is new, the options that all of them have."""
        groups[-1].update(_wishes(defaults))
        for name, value in cls.absent.items():
            if any(name in group for group in groups):
                for group in groups:
                    group.setdefault(name, value)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the state arrays that parameters of this group have."""
        return self.states

    def initial(self, history: History) -> Mapping[str, float]:
        """Return the state arrays that have to be filled with a number before the next step, with that number."""
        missing = {state: option for state, option in self.initial_states.items() if state not in history.states}
        return {state: self._fixed[option] for state, option in missing.items() if self._fixed[option]}

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> HostRule:
        """Return the rule, with the group's present options, for the next step of a parameter with this history;
        ``arrays`` names the rows of a state buffer."""
        values = {**self.values_of(group), "step": history.step + 1, **self.more_fields(group, history)}
        if "betas" in values:
            values["beta1"], values["beta2"] = values["betas"]
        return self.rule(**{field.name: values[field.name] for field in fields(self.rule)})

    def more_fields(self, group: Mapping[str, Any], history: History) -> Mapping[str, Any]:
        """Return the fields of the rule that are neither options nor the step count."""
        return {}

    def after(self, group: Mapping[str, Any], history: History) -> History:
        """Return the history after the next step."""
        return history._replace(step=history.step + 1, states=history.states | frozenset(self.states_of(group)))


# -- elementwise optimizers of torch that have no kernel here, and are run by torch on host tiles ---------------------


class _States(NamedTuple):
    """States that one of torch's optimizers keeps for each parameter, besides the step count."""

    arrays: tuple[str, ...]
    scalars: tuple[str, ...] = ()
    switches: Mapping[str, str] = {}
    """Arrays that a group has only if the named option is true."""


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
"""Optimizers by their name in ``torch.optim``. The new value of an element depends only on that element, its gradient,
its states and the step count."""


def states_of_all_rules() -> set[str]:
    """Return the names of the states of every optimizer, longshore's and torch's elementwise ones."""
    native = (name for family in RuleFamily.__subclasses__() for name in getattr(family, "states", ()))
    elementwise = (name for found in ELEMENTWISE.values() for name in (*found.arrays, *found.scalars))
    return {*native, *elementwise, "master"}


class TorchFamily(RuleFamily):
    """The rule of one of torch's elementwise optimizers.

    Args:
        kind: the optimizer's name in ``torch.optim``; one of :data:`ELEMENTWISE`.
    """

    encodable = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        found = ELEMENTWISE[kind]
        self._switches = found.switches
        self.states = found.arrays
        self.optional_states = frozenset(found.switches)
        self.scalars = found.scalars
        self._make = partial(getattr(torch.optim, kind), [torch.zeros(1, device="cpu")])
        self._names = [name for name in self._make().defaults if name not in IMPLEMENTATION_FLAGS]

    def values_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group's options in a form that can be compared: tensors with their dtype, lists as tuples."""
        return {name: _plain(group[name], name) for name in self._names}

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        self._make(**torch_options(self.values_of(group).items()))  # torch's constructor checks the values

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        return [name for name in self.states if name not in self._switches or group[self._switches[name]]]

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> TorchRule:
        return TorchRule(
            kind=self.kind,
            options=tuple(self.values_of(group).items()),
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
    if isinstance(value, Tensor):
        return OneElement(number(value, name), value.dtype)
    if isinstance(value, str):
        number(value, name)  # raises: no option of these is a text
    return tuple(_plain(part, name) for part in value) if isinstance(value, (list, tuple)) else value
