"""Optimizers whose rule has kernels here, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from longshore.optim.family import RuleFamily
from longshore.optim.host_optimizer import HostOptimizer

OPTIMIZERS: dict[str, type[RuleOptimizer]] = {}
"""Every :class:`RuleOptimizer` that was defined, by the name of its class."""

_OF_THE_WHOLE_OPTIMIZER = frozenset({"self", "__class__", "params", "release_gradients", "offload"})


class RuleOptimizer(HostOptimizer):
    """Base of the optimizers that have kernels, one for each name that a configuration may give.

    The constructor of a subclass has the signature of torch's, and passes ``locals()`` on: its signature is the one
    table of options and defaults, so none can be accepted and then forgotten.
    """

    rules: ClassVar[type[RuleFamily]]
    twin: ClassVar[type[torch.optim.Optimizer] | None] = None
    """The class in ``torch.optim`` that has the same groups and states."""
    deepspeed_defaults: ClassVar[Mapping[str, Any]] = {}
    """Where a DeepSpeed file that leaves an option out means something else than the signature."""
    suggested: ClassVar[Mapping[str, Any]] = {"lr": 1e-4}
    """Parameters that the planner writes into a DeepSpeed file, for the user to change."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if RuleOptimizer in cls.__bases__:  # and no subclass of one of ours
            OPTIMIZERS[cls.__name__] = cls

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Build the optimizer.

        Args:
            arguments: ``locals()`` of the subclass' constructor, taken first.
        """
        options = {name: value for name, value in arguments.items() if name not in _OF_THE_WHOLE_OPTIMIZER}
        family = self.rules(**{name: options[name] for name in self.rules.fixed_options})
        if options.get("fused", True) is None:
            options["fused"] = True
        super().__init__(arguments["params"], options, family, arguments["release_gradients"], arguments["offload"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: an option or a parameter that cannot be honoured, by name; the optimizer is then as it was.
        """
        super().add_param_group(param_group)
        if "fused" in self.defaults:
            self.param_groups[-1]["fused"] = True  # which None means here; False is refused

    @classmethod
    def defaults_by_name(cls) -> dict[str, Any]:
        """The options of a group that a configuration may give, with their defaults in the signature."""
        parameters = inspect.signature(cls).parameters
        return {name: parameters[name].default for name in cls.rules.options if name not in cls.rules.fixed_options}
