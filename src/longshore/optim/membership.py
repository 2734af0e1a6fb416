"""Parameters that users put into the groups of an optimizer, and take out of them, by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from longshore.errors import ParameterError
from longshore.optim.gradients import GradientSource
from longshore.optim.offload import Offload, StoreFactory
from longshore.optim.parameters import is_lazy
from longshore.optim.state import StateOwner


class GroupOwner(StateOwner, Protocol):
    """The parts of an ``OptimizerCore`` that depend on its groups."""

    groups: Callable[[], list[dict[str, Any]]]
    offload: StoreFactory
    parameters: dict[int, Tensor]
    _source: GradientSource | None

    def register(self, group: Mapping[str, Any], place: int) -> None: ...


def take_up(core: GroupOwner) -> None:
    """Lay out the parameters that the user put into the groups, in place of those that were taken out and have no
    state: scripts that grow and prune parameters replace them.

    Raises:
        ParameterError: the optimizer is an engine's, whose ranks have to lay out the same, or a parameter has no shape.
        ValueError: a parameter, which the message names, cannot be stepped.
    """
    if not isinstance(core.offload, Offload):
        raise ParameterError(
            "a parameter group holds a tensor that this optimizer was not built with; "
            "use optimizer.add_param_group(), or build the optimizer anew"
        )
    members = {id(parameter) for group in core.groups() for parameter in group["params"]}
    gone = [record for record in core.records if id(record.parameter) not in members and not record.has_state]
    if core._source is not None and gone:
        core._source.drop(gone)
    for record in gone:
        core.handed_out.forget(record)
        core.handed_out.states.pop(id(record.parameter), None)
        del core.by_id[id(record.parameter)], core.parameters[record.index]
    for place, group in enumerate(core.groups()):
        params = group["params"]
        names = group.get("param_names") or []
        new = [
            (names[position] if position < len(names) else f"{place}.{position}", parameter)
            for position, parameter in enumerate(params)
            if id(parameter) not in core.by_id
        ]
        for name, parameter in new:
            if is_lazy(parameter):
                raise ParameterError(
                    f"parameter {name} is lazy and has no shape yet: run the model once before the step"
                )
        core.register({"params": [each for _, each in new], "param_names": [name for name, _ in new]}, place)
    core.handed_out.place(core)
