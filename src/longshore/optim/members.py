"""Parameters of one optimizer: their records, the store in which they are laid out, and their next rules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.kernels import HostRule, MatrixRule, Scale
from longshore.optim.dtensor import check_not_wrapped
from longshore.optim.family import History, RuleFamily
from longshore.optim.gradients import GradientSource, KeptGradients, ReleasedGradients
from longshore.optim.offload import Offload
from longshore.optim.parameters import ParameterRecord, check_no_shared_memory, check_parameter, is_lazy
from longshore.optim.user_state import UserState
from longshore.store import Store
from longshore.tiles import Forecast, Ranges, Recorder, Window, annotating


class Phase(Enum):
    """How far an optimizer is with its parameters."""

    BUILDING = auto()
    """The constructor still adds groups. They are laid out together: a tile may have several groups."""
    LAID_OUT = auto()
    """No step was applied: parameters that all are replaced or moved are laid out anew."""
    STEPPED = auto()
    """A step was applied. A parameter that was moved is an error."""


class Members:
    """The parameters of one optimizer, with their store and the states that users have of them.

    Args:
        groups: returns the optimizer's ``param_groups``, which users may replace at any time.
        family: the optimizer's rule.
        offload: decides where the state is.
        release_gradients: whether gradients leave for the host during backward.
        window: the optimizer's accumulation window.
    """

    def __init__(
        self,
        groups: Callable[[], list[dict[str, Any]]],
        family: RuleFamily,
        offload: Offload,
        release_gradients: bool,
        window: Window,
    ) -> None:
        family.encode_states(offload.state_format)
        # These are fixed.
        self.family = family
        self.offload = offload
        self.release_gradients = release_gradients
        self.groups = groups
        self.window = window
        self.user_state = UserState()
        # These grow with parameter groups.
        self._source: GradientSource | None = None
        self._nothing: GradientSource | None = None
        """Source of no gradients, where there is no parameter: those that come may be on another device."""
        self.by_id: dict[int, ParameterRecord] = {}
        """Records by ``id(parameter)``; each keeps its parameter alive."""
        self.parameters: dict[int, Tensor] = {}
        """Parameters by the index of their record."""
        self._next_index = 0
        """Index of the next record. None is used twice: tiles keep the segments of parameters that are gone."""
        self.phase = Phase.BUILDING

    @property
    def source(self) -> GradientSource:
        """Source of the window's gradients."""
        if self.phase is not Phase.STEPPED and self._outdated():
            self._lay_out_anew()
        if self._source is None:
            self._take_up()  # lazy parameters may have their shapes by now
        if self._source is not None:
            return self._source
        if self._nothing is None:
            self._nothing = self._source_on(torch.device("cpu"))
        return self._nothing

    @property
    def empty(self) -> bool:
        """Whether there was no parameter in any group yet."""
        return self._source is None and not any(group["params"] for group in self.groups())

    @property
    def store(self) -> Store:
        """Store that keeps the state."""
        return self.source.store

    @property
    def records(self) -> list[ParameterRecord]:
        """Records of all parameters, in the order of their index."""
        return list(self.by_id.values())

    def records_of(self, group: Mapping[str, Any]) -> list[ParameterRecord]:
        """Return the records of the parameters that are in a group now. As in torch, a parameter that the user removed
        is no longer stepped, and one that the user put into the group is (see :meth:`_take_up`)."""
        try:
            return [self.by_id[id(parameter)] for parameter in group["params"]]
        except KeyError:
            self._take_up()
            return [self.by_id[id(parameter)] for parameter in group["params"]]

    def indices(self) -> set[int]:
        """Return the indices of the parameters that are in the groups now."""
        _ = self.source  # parameters may have been moved
        return {record.index for group in self.groups() for record in self.records_of(group)}

    def _indices_weakly(self) -> Callable[[], set[int]]:
        """Return :meth:`indices`, as a function that does not keep this object alive."""
        alive = weakref.proxy(self)
        return lambda: alive.indices()

    def _ids(self) -> set[int]:
        """Return ``id(parameter)`` of the parameters that are in the groups now."""
        return {id(parameter) for group in self.groups() for parameter in group["params"]}

    def check_once(self) -> None:
        """Raise ParameterError, naming both places, for a parameter that is in the groups twice now: it would be
        stepped twice."""
        groups = self.groups()
        if len(self._ids()) == sum(len(group["params"]) for group in groups):
            return
        first: dict[int, tuple[int, int]] = {}
        for place, group in enumerate(groups):
            for position, parameter in enumerate(group["params"]):
                here = place, position
                if (there := first.setdefault(id(parameter), here)) != here:
                    record = self.by_id.get(id(parameter))
                    name = f"{place}.{position}" if record is None else record.name
                    one, other = (f"param_groups[{group}]['params'][{at}]" for group, at in (there, here))
                    raise ParameterError(
                        f"parameter {name} is in the parameter groups twice; keep it in one place: {one} or {other}"
                    )

    def present(self) -> list[ParameterRecord]:
        """Return the records of the parameters that are in the groups now, in the order of their index."""
        found = self.indices()
        return [record for record in self.records if record.index in found]

    def planned(self, among: Container[int]) -> Iterator[tuple[ParameterRecord, HostRule, History]]:
        """Yield the record, the next rule and the history after it for each parameter whose index is in ``among``."""
        arrays = self.store.tiles.tier.elementwise.names
        for group in self.groups():
            family = self.family.of(group)
            known: dict[History, tuple[HostRule, History]] = {}
            last, rule, after = None, None, None
            for record in self.records_of(group):
                if record.index not in among:
                    continue
                # Parameters with equal histories share one object after their first common step.
                if (history := record.history) is not last or rule is None or after is None:
                    record.check_kind(family, group)
                    if history not in known:
                        made = family.rule_of(group, history, arrays)
                        if not isinstance(made, MatrixRule):
                            _ = made.scalars  # computed here, once: a rule steps many tiles
                        known[history] = made, family.after(group, history)
                    last, (rule, after) = history, known[history]
                yield record, rule, after

    def name_states(self, store: Store) -> None:
        """Add the state arrays of all groups to the store unless it has them."""
        self.have_states(store, {name for group in self.groups() for name in self.family.states_of(group)})

    def have_states(self, store: Store, names: Collection[str]) -> None:
        """Add these state arrays to the store unless it has them."""
        tier, matrix_state = store.tiles.tier, self.family.matrix_state
        arrays = tier.elementwise.names
        if not all(name in arrays or name in tier.of_matrices.names for name in names):
            known = [name for name in self.family.states if name != matrix_state]
            of_matrices = () if matrix_state is None else (matrix_state,)
            elementwise = [name for name in known if name in names or name in arrays]
            store.states.ranges.set_states(elementwise, of_matrices)

    def _take_up(self) -> None:
        """Lay out the parameters that the user put into the groups, in place of those that were taken out and have no
        state: scripts that grow and prune parameters replace them.

        Raises:
            ParameterError: the optimizer is an engine's, whose ranks have to lay out the same, or a parameter has no
                shape or is in the groups twice.
            ValueError: a parameter, which the message names, cannot be stepped.
        """
        if not self.offload.alone:
            raise ParameterError(
                "a parameter group holds a tensor that this optimizer was not built with; "
                "use optimizer.add_param_group(), or build the optimizer anew"
            )
        found = self._ids()
        gone = [record for record in self.records if id(record.parameter) not in found and not record.has_state]
        if self._source is not None and gone:
            self._source.drop(gone)
        for record in gone:
            self.user_state.forget(record)
            self.user_state.states.pop(id(record.parameter), None)
            del self.by_id[id(record.parameter)], self.parameters[record.index]
        for place, group in enumerate(self.groups()):
            params = group["params"]
            names = group.get("param_names") or []
            new = [
                (names[position] if position < len(names) else f"{place}.{position}", parameter)
                for position, parameter in enumerate(params)
                if id(parameter) not in self.by_id
            ]
            for name, parameter in new:
                if is_lazy(parameter):
                    raise ParameterError(
                        f"parameter {name} is lazy and has no shape yet: run the model once before the step"
                    )
            self.register(
                {**group, "params": [each for _, each in new], "param_names": [name for name, _ in new]}, place
            )
        self.user_state.place(self)

    def register(self, group: Mapping[str, Any], place: int) -> None:
        """Add the parameters of the ``place``-th group. If one cannot be stepped, raise ValueError and add none, or
        ParameterError if it is in the groups twice."""
        self.check_once()
        names = group.get("param_names")
        records: list[ParameterRecord] = []
        device = self.records[0].device if self.by_id else None
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in self.by_id:
                continue  # it was moved here from another group; as in torch, its state is its own and not the group's
            name = names[position] if names else f"{place}.{position}"
            if is_lazy(parameter) and self.offload.alone:
                continue  # it is taken up when it has a shape
            check_parameter(parameter, name, device, self.offload.takes_shards)
            self.offload.check_member(parameter, name)
            device = parameter.device
            index = self._next_index + len(records)
            records.append(ParameterRecord(index, name, parameter, self.offload, self.family, group))
        if self.phase is not Phase.BUILDING:
            check_no_shared_memory([*self.records, *records])
            self._lay_out(records)
        self._next_index += len(records)
        self.by_id.update((id(record.parameter), record) for record in records)

    def end_building(self) -> None:
        """Lay out all groups that the optimizer was built with. As in torch, they may be filled later, unless ranks
        have to lay out the same. Raises ValueError if two parameters share memory."""
        self.phase = Phase.LAID_OUT
        if self.empty and not self.offload.alone:
            raise ValueError("optimizer got parameter groups without a single parameter")
        check_no_shared_memory(self.records)
        self._lay_out(self.records)

    def _lay_out(self, records: list[ParameterRecord]) -> None:
        if not records:
            return
        if self.release_gradients and self.offload.alone:
            check_not_wrapped([record.parameter for record in records])
        self.parameters.update((record.index, record.parameter) for record in records)
        if self._source is None:
            self._source = self._source_on(records[0].device)
            recorders: list[Recorder] = [Ranges()] if annotating() else []
            if self._nothing is not None:
                recorders += self._nothing.store.tiles.recorders
                _let_go(self._nothing, self._source)
                self._nothing = None
            self._source.store.set_recorders(recorders)
            self._source.store.foresee(_MembersForecast(self))
        self.name_states(self._source.store)
        self._source.register(records)

    def _source_on(self, device: torch.device) -> GradientSource:
        store = self.offload.make_store(device, self.release_gradients, self.parameters, self.window)
        return (ReleasedGradients if self.release_gradients else KeptGradients)(store, self._indices_weakly())

    def _outdated(self) -> bool:
        """Return whether, before the first step, all parameters were replaced, or one was moved or converted. A state
        that was loaded, or a gradient that is on the host, would be lost: then the step names the change."""
        found = self._ids()
        if self._source is None or not found or any(record.has_state for record in self.records):
            return False
        known = [record for key, record in self.by_id.items() if key in found]
        moved = self.offload.alone and any(record.moved for record in known)
        return not known or (moved and not self.window.arrived)

    def _lay_out_anew(self) -> None:
        """Lay out the parameters that are in the groups now: scripts and frameworks make the optimizer first, and then
        move, convert or shard (FSDP2) the model. If this raises, nothing was changed."""
        fresh = Members(self.groups, self.family, self.offload, self.release_gradients, self.window)
        for place, group in enumerate(self.groups()):
            fresh.register(group, place)
        fresh.end_building()
        fresh.store.foresee(_MembersForecast(self))
        if self._source is not None:
            fresh.store.set_recorders(self._source.store.tiles.recorders)
            _let_go(self._source, fresh.source)
            self._source.replaced_by = fresh._source
        fresh.source.members = self._indices_weakly()
        self.user_state.states.clear()
        self.window.lose_gradients()
        self._source, self.by_id, self.parameters = fresh._source, fresh.by_id, fresh.parameters

    def close(self) -> None:
        """Wait for work under way, remove the hooks, and end the threads."""
        for source in (self._source, self._nothing):
            if source is not None:
                source.close()


def _let_go(former: GradientSource, successor: GradientSource) -> None:
    """Close a source, unless both use the copy streams that the user gave."""
    same = former.store.tiles.streams is successor.store.tiles.streams
    former.remove_hooks() if same else former.close()


class _MembersForecast(Forecast):
    """Forecast of a step with the present parameter groups, without clipping; does not keep the members alive."""

    def __init__(self, members: Members) -> None:
        self._window = members.window
        self._members = weakref.ref(members)

    def scale(self) -> Scale:
        return self._window.unclipped

    def rules(self) -> Mapping[int, HostRule]:
        members = self._members()
        return {} if members is None else {each.index: rule for each, rule, _ in members.planned(members.parameters)}
