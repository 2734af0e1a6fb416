"""Parameters that users put into the groups of an optimizer, and take out of them, by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.layout.tiles import MatrixLayout
from longshore.optim.family import RuleFamily
from longshore.optim.gradients import GradientSource
from longshore.optim.offload import Offload
from longshore.optim.parameters import ParameterRecord, is_lazy
from longshore.optim.state import StateOwner


class GroupOwner(StateOwner, Protocol):
    """The parts of an ``OptimizerCore`` that depend on its groups."""

    groups: Callable[[], list[dict[str, Any]]]
    offload: Offload
    parameters: dict[int, Tensor]
    _source: GradientSource | None

    def register(self, group: Mapping[str, Any], place: int) -> None: ...


def member_ids(groups: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return ``id(parameter)`` of the parameters that are in the groups now."""
    return {id(parameter) for group in groups for parameter in group["params"]}


def members_of(core: GroupOwner) -> Callable[[], set[int]]:
    """Return ``core.members``, as a function that does not keep the core alive."""
    alive = weakref.proxy(core)
    return lambda: alive.members()


def check_once(core: GroupOwner) -> None:
    """Raise ParameterError, naming both places, for a parameter that is in the groups twice: it would be stepped twice.

    What counts is where it is now: it may have been in another group before.
    """
    groups = core.groups()
    if len(member_ids(groups)) == sum(len(group["params"]) for group in groups):
        return
    first: dict[int, tuple[int, int]] = {}
    for place, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            here = place, position
            if (there := first.setdefault(id(parameter), here)) != here:
                record = core.by_id.get(id(parameter))
                name = f"{place}.{position}" if record is None else record.name
                one, other = (f"param_groups[{group}]['params'][{at}]" for group, at in (there, here))
                raise ParameterError(
                    f"parameter {name} is in the parameter groups twice; keep it in one place: {one} or {other}"
                )


def check_groups(core: GroupOwner) -> None:
    """Check the options of all groups, with what was put into these since they were made."""
    for group in core.groups():
        core.family.check_group(group)
        core.family.of(group).check_step(group)


def check_kind(record: ParameterRecord, family: RuleFamily, group: Mapping[str, Any]) -> None:
    """Raise ParameterError for a parameter that is in a group of another kind than the one it was laid out with, and
    for a matrix that would be stepped under autocast."""
    try:
        layout = family.matrix_layout(group, tuple(record.shape))
    except ValueError as error:
        raise ParameterError(f"parameter {record.name} {error}") from None
    if layout is not None and (device := _autocast_device()):
        raise ParameterError(
            f"parameter {record.name} is stepped inside torch.autocast({device!r}), which would choose the dtype of "
            "Newton-Schulz: call step() outside of it, and keep forward and the loss inside"
        )
    if record.family is family and record.matrices == layout:
        return
    was, now = ("no matrix" if each is None else _words_of(each) for each in (record.matrices, layout))
    raise ParameterError(
        f"parameter {record.name} was laid out as {was}, and its group makes it {now} now (use_muon, split or "
        "split_dim was changed, or it was put into another group): its state does not fit; build the optimizer anew"
    )


def _autocast_device() -> str:
    """Return a type of device for which this thread has autocast on, or an empty string."""
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return next((each for each in types if torch.is_autocast_enabled(each)), "")


def _words_of(layout: MatrixLayout) -> str:
    shapes = ", ".join(str(list(layout.shape_of(block))) for block in layout.blocks[:3])
    return f"{len(layout.blocks)} matrices of {shapes}{', ...' if len(layout.blocks) > 3 else ''}"


def take_up(core: GroupOwner) -> None:
    """Lay out the parameters that the user put into the groups, in place of those that were taken out and have no
    state: scripts that grow and prune parameters replace them.

    Raises:
        ParameterError: the optimizer is an engine's, whose ranks have to lay out the same, or a parameter has no shape
            or is in the groups twice.
        ValueError: a parameter, which the message names, cannot be stepped.
    """
    if not core.offload.alone:
        raise ParameterError(
            "a parameter group holds a tensor that this optimizer was not built with; "
            "use optimizer.add_param_group(), or build the optimizer anew"
        )
    members = member_ids(core.groups())
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
        core.register({**group, "params": [each for _, each in new], "param_names": [name for name, _ in new]}, place)
    core.handed_out.place(core)
