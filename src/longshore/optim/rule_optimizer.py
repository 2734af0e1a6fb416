"""Base class of the optimizers that have kernels, and the list of them by name."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from longshore.layout.formats import StateFormat
from longshore.optim.family import RuleFamily
from longshore.optim.other_words import check_group_words, check_words, parameters_of, without_words
from longshore.optim.tiled_optimizer import TiledOptimizer

if TYPE_CHECKING:
    from typing_extensions import Self

OPTIMIZERS: dict[str, type[RuleOptimizer]] = {}
"""Every :class:`RuleOptimizer` that was defined, by the name of its class."""


class RuleOptimizer(TiledOptimizer):
    """Base class of the optimizers that have kernels, one for each name that a configuration may give.

    The constructor of a subclass has the signature of torch's, and passes ``locals()`` on: its signature is the only
    table of options and defaults, so no option can be accepted and then forgotten.
    """

    rules: ClassVar[type[RuleFamily]]
    twin: ClassVar[type[torch.optim.Optimizer] | None] = None
    """The class in ``torch.optim`` that has the same groups and states."""
    file_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of options that a configuration file leaves out, where they differ from the signature's."""
    suggested: ClassVar[Mapping[str, Any]] = {"lr": 1e-4}
    """Options that the planner writes into a configuration file, for the user to change."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if RuleOptimizer in cls.__bases__:  # not for subclasses of our own optimizers
            OPTIMIZERS[cls.__name__] = cls
            cls.__init__ = without_words(cls, cls.__init__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_words(cls, parameters_of(cls), args, kwargs)
        return super().__new__(cls)

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Build the optimizer from ``locals()`` of the subclass's constructor, taken first."""
        options = self.rules.group_options(arguments)
        family = self.rules(**{name: options[name] for name in self.rules.initial_states.values()})
        super().__init__(arguments["params"], options, family, arguments["release_gradients"], arguments["offload"])
        states = self._core.offload.state_format
        if states is not StateFormat.FP32 and not any(map(family.states_of, self.param_groups)):
            warnings.warn(
                f"{type(self).__name__} has no states with these options, so that states={states.value!r} changes "
                "nothing until a group has some (of SGD: a momentum)",
                stacklevel=4,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_group_words(type(self), param_group)
        super().add_param_group(param_group)
        known = {*self.defaults, *self.rules.options, *self.rules.absent, "params", "param_names", "initial_lr"}
        for name in self.param_groups[-1].keys() - known:
            alike = [each for each in known if abs(len(each) - len(str(name))) <= 1]  # no max_momentum of a schedule
            if close := difflib.get_close_matches(str(name), alike, 1, 0.75):
                warnings.warn(f"a group has {name!r}, which is no option; {close[0]!r} is one", stacklevel=4)
        self.rules.complete(self.param_groups, self.defaults)

    @classmethod
    def defaults_by_name(cls) -> dict[str, Any]:
        """Return the options of a group that a configuration may give, with their defaults in the signature."""
        parameters, fixed = parameters_of(cls), cls.rules.initial_states.values()
        return {name: parameters[name].default for name in cls.rules.options if name not in fixed}
