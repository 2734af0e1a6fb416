"""What an optimizer has to know of its rule: options of a parameter group, names of states, and the next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from longshore.errors import ParameterError
from longshore.kernels import HostRule

if TYPE_CHECKING:  # which imports History
    from longshore.optim.parameters import ParameterRecord


class History(NamedTuple):
    """What the next step of a parameter depends on besides its group, its arrays and its gradient."""

    step: int = 0
    """Applied steps; the truth for this parameter alone (law 3)."""
    states: frozenset[str] = frozenset()
    """The state arrays that have values; others are as if they had never been."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, besides the step count."""


# -- options of a parameter group ---------------------------------------------
# Each function below reads one option: it returns the value as plain Python numbers, or raises.


def number(value: Any, name: str) -> float:
    """A number, or a tensor of one element.

    Raises:
        ValueError: a tensor of more.
        TypeError: anything else.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor has one element, not {value.numel()}")
        return float(value.item())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number or a one-element tensor, not {type(value).__name__}")
    return float(value)


def not_negative(value: Any, name: str) -> float:
    """A :func:`number` of at least 0."""
    found = number(value, name)
    if not found >= 0.0:
        raise ValueError(f"{name} must not be negative, and is {found}")
    return found


def beta(value: Any, name: str) -> float:
    """A decay rate: a :func:`number` of at least 0 and below 1."""
    found = number(value, name)
    if not 0.0 <= found < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, and is {found}")
    return found


def betas(value: Any, name: str) -> tuple[float, float]:
    """A pair of decay rates."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} is a pair, not {value!r}")
    return beta(value[0], f"{name}[0]"), beta(value[1], f"{name}[1]")


def flag(value: Any, name: str) -> bool:
    """Anything that is true or false."""
    return bool(value)


_REFUSED = {
    "amsgrad": "the maximum of second moments is not kept; use amsgrad=False",
    "capturable": "a step that runs on the host cannot be captured in a CUDA graph; use capturable=False",
    "differentiable": "autograd cannot see a step that runs on the host; use differentiable=False",
    "foreach": "longshore always runs one fused pass; leave foreach unset",
}

IMPLEMENTATION_FLAGS = {"foreach": None, "fused": True, "capturable": False, "differentiable": False}
"""How a step is computed, not what it computes: taken from here, never from a loaded state. ``fused`` is True, so that
torch's optimizer of the same name, which takes it from the state that it loads, goes on with the same bits."""


def check_flags(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a way to compute a step that longshore does not have, by name."""
    for name, why in _REFUSED.items():
        if group.get(name):
            raise ValueError(f"{name}={group[name]} is not supported: {why}")
    if group.get("fused") is False:
        raise ValueError("fused=False is not supported: longshore always runs one fused pass; leave fused unset")


# -- families -----------------------------------------------------------------


class RuleFamily(ABC):
    """The rules of one optimizer: the options of its groups, and the names of its states.

    Groups and states have the names that ``torch.optim`` gives them.
    """

    options: ClassVar[Mapping[str, Callable[[Any, str], Any]]] = {}
    """The options of a group that make the rule, and the function that reads each."""
    states: tuple[str, ...]
    """All state arrays that a rule may have, in the order in which it reads them from a page."""
    optional_states: frozenset[str] = frozenset()
    """Those that a parameter which was stepped may still lack."""
    scalars: tuple[str, ...] = ()
    """States that are one number, besides the step count."""
    keeps_step: bool = True
    """Whether ``"step"`` is part of the state."""
    needs_step: bool = True
    """Whether a state from outside that lacks it is refused."""
    refused_states: ClassVar[Mapping[str, str]] = {}
    """Entries of a state from outside that cannot be honoured, and why."""
    fixed_options: ClassVar[frozenset[str]] = frozenset()
    """Options that are read when the optimizer is built and never again."""

    @property
    def required(self) -> frozenset[str]:
        """What a state from outside has to have."""
        own = {*self.states, *self.scalars} - self.optional_states
        return frozenset({*own, "step"} if self.keeps_step and self.needs_step else own)

    def values_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The group's options as plain numbers.

        Raises:
            ValueError: a value out of range, or two that contradict each other.
            TypeError: something that is not a number.
        """
        values = {name: read(group[name], name) for name, read in self.options.items()}
        self.check_together(values)
        return values

    @staticmethod
    def check_together(values: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for options that contradict each other."""
        return  # most cannot

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Check a group's options, and raise for what cannot be honoured, by name.

        Raises:
            ValueError: an option that longshore does not do, or a value out of range.
            TypeError: something that is not a number.
        """
        check_flags(group)
        self.values_of(group)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        """The state arrays that parameters of this group have."""
        return self.states

    def initial(self, history: History) -> Mapping[str, float]:
        """The state arrays that are not zero before a parameter's first step, and what they are filled with."""
        return {}

    @abstractmethod
    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> HostRule:
        """The group's hyper-parameters as they are now, for the next step of a parameter with this history.

        ``arrays`` names the rows of a page.
        """

    def after(self, group: Mapping[str, Any], history: History) -> History:
        """The history once that step is applied."""
        return history._replace(step=history.step + 1, states=history.states | frozenset(self.states_of(group)))


# -- from groups to rules -----------------------------------------------------


def records_of(group: Mapping[str, Any], records: Mapping[int, ParameterRecord]) -> list[ParameterRecord]:
    """The group's parameters as the user left them; one taken out is no longer stepped, as in torch.

    Args:
        group: of an optimizer.
        records: by ``id(parameter)``.

    Raises:
        ParameterError: the group holds a tensor that has no record.
    """
    try:
        return [records[id(parameter)] for parameter in group["params"]]
    except KeyError:
        raise ParameterError(
            "a parameter group holds a tensor that this optimizer was not built with; "
            "use optimizer.add_param_group(), or build the optimizer anew"
        ) from None


def planned(
    groups: Iterable[Mapping[str, Any]],
    records: Mapping[int, ParameterRecord],
    family: RuleFamily,
    arrays: Sequence[str],
    among: Container[int],
) -> Iterator[tuple[ParameterRecord, HostRule, History]]:
    """How each parameter ``among`` these (by the index of its record) is stepped, and its history afterwards."""
    for group in groups:
        known: dict[History, tuple[HostRule, History]] = {}
        last, rule, after = None, None, None
        for record in records_of(group, records):
            if record.index not in among:
                continue
            # Parameters with equal histories share one object after their first common step.
            if (history := record.history) is not last or rule is None or after is None:
                if history not in known:
                    made = family.rule_of(group, history, arrays)
                    _ = made.scalars  # computed here, once: a rule steps many tiles
                    known[history] = made, family.after(group, history)
                last, (rule, after) = history, known[history]
            yield record, rule, after
