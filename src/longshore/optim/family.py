"""What an optimizer has to know of its rule, and nothing else in it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from longshore.kernels import HostRule


class History(NamedTuple):
    """What the next step of a parameter depends on besides its group, its arrays and its gradient."""

    step: int = 0
    """Applied steps; the truth for this parameter alone (law 3)."""
    states: frozenset[str] = frozenset()
    """The state arrays that have values; others are as if they had never been."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, besides the step count."""


class RuleFamily(ABC):
    """The rules of one optimizer: the hyper-parameters of its groups, and the names of its states.

    Groups and states have the names that ``torch.optim`` gives them.
    """

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
    fixed_options: frozenset[str] = frozenset()
    """Options that are read when the optimizer is built and never again."""

    @property
    def required(self) -> frozenset[str]:
        """What a state from outside has to have."""
        own = {*self.states, *self.scalars} - self.optional_states
        return frozenset({*own, "step"} if self.keeps_step and self.needs_step else own)

    @abstractmethod
    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse what cannot be honoured, by name.

        Raises:
            ValueError: an option that longshore does not do, or a value out of range.
            TypeError: something that is not a number.
        """

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
