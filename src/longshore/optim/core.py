"""Core of one optimizer: its parameters, the store of their state and gradients, and the step.

:class:`~longshore.optim.tiled_optimizer.TiledOptimizer` is the interface that ``torch.optim`` prescribes; engines,
checkpoints and traces use the core.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError, debugging
from longshore.interrupts import deferred_interrupts
from longshore.kernels import HostRule, MatrixRule, Scale
from longshore.optim.adoption import Adoption
from longshore.optim.family import History, RuleFamily
from longshore.optim.gradients import GradientSource, KeptGradients, ReleasedGradients
from longshore.optim.handed_out import HandedOut
from longshore.optim.offload import Offload
from longshore.optim.parameters import ParameterRecord, check_no_shared_memory, check_parameter, is_lazy
from longshore.optim.released import refuse_capture
from longshore.optim.repeated import RepeatedStep, repeated_step
from longshore.optim.shards import check_not_wrapped
from longshore.optim.state import fill_initial
from longshore.store import Store
from longshore.tiles import Ended, Entry, Forecast, ParameterStep, Ranges, Recorder, Window, annotating


class OptimizerCore:
    """The parameters of one optimizer, with their store.

    Args:
        groups: returns the optimizer's ``param_groups``, which users may replace at any time.
        family: the optimizer's rule.
        offload: decides where the state is.
        release_gradients: whether gradients leave for the host during backward.
        window: its accumulation window; None: a new one.
    """

    def __init__(
        self,
        groups: Callable[[], list[dict[str, Any]]],
        family: RuleFamily,
        offload: Offload,
        release_gradients: bool,
        window: Window | None = None,
    ) -> None:
        family.encode_states(offload.state_format)
        # These are fixed.
        self.family = family
        self.offload = offload
        self.release_gradients = release_gradients
        self.groups = groups
        self.window = Window() if window is None else window
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
        self._building = True
        """Whether the constructor still adds groups. They are laid out together: a tile may have several groups."""
        self._begun = False
        """Whether a step was applied."""
        self.handed_out = HandedOut()
        # These change with each window.
        self._adoption = Adoption(offload.detect_writes)
        self._agreed: Mapping[int, Tensor | None] | None = None
        """Gradients that all ranks agreed on, in :meth:`one_agreement`."""
        self._repeated: RepeatedStep | None = None
        """What can be told of the next step, if nothing changes until then."""

    # -- parameters -----------------------------------------------------------

    @property
    def source(self) -> GradientSource:
        """Source of the window's gradients."""
        if not self._begun and self._outdated():
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

    def members(self) -> set[int]:
        """Return the indices of the parameters that are in the groups now."""
        _ = self.source  # parameters may have been moved
        return {record.index for group in self.groups() for record in self.records_of(group)}

    def _members_weakly(self) -> Callable[[], set[int]]:
        """Return :meth:`members`, as a function that does not keep the core alive."""
        alive = weakref.proxy(self)
        return lambda: alive.members()

    def _member_ids(self) -> set[int]:
        """Return ``id(parameter)`` of the parameters that are in the groups now."""
        return {id(parameter) for group in self.groups() for parameter in group["params"]}

    def _check_once(self) -> None:
        """Raise ParameterError, naming both places, for a parameter that is in the groups twice now: it would be
        stepped twice."""
        groups = self.groups()
        if len(self._member_ids()) == sum(len(group["params"]) for group in groups):
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

    def _check_groups(self) -> None:
        """Check the options of all groups, as scripts left them."""
        for group in self.groups():
            self.family.check_group(group)
            self.family.of(group).check_step(group)

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
        members = self._member_ids()
        gone = [record for record in self.records if id(record.parameter) not in members and not record.has_state]
        if self._source is not None and gone:
            self._source.drop(gone)
        for record in gone:
            self.handed_out.forget(record)
            self.handed_out.states.pop(id(record.parameter), None)
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
        self.handed_out.place(self)

    def register(self, group: Mapping[str, Any], place: int) -> None:
        """Add the parameters of the ``place``-th group. If one cannot be stepped, raise ValueError and add none, or
        ParameterError if it is in the groups twice."""
        self._check_once()
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
        if not self._building:
            check_no_shared_memory([*self.records, *records])
            self._lay_out(records)
        self._next_index += len(records)
        self.by_id.update((id(record.parameter), record) for record in records)

    def end_building(self) -> None:
        """Lay out all groups that the optimizer was built with. As in torch, they may be filled later, unless ranks
        have to lay out the same. Raises ValueError if two parameters share memory."""
        self._building = False
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
                self._nothing.close()
                self._nothing = None
            self._source.store.set_recorders(recorders)
            self._source.store.foresee(_OptimizerForecast(self))
        self._name_states(self._source.store)
        self._source.register(records)

    def _source_on(self, device: torch.device) -> GradientSource:
        store = self.offload.make_store(device, self.release_gradients, self.parameters, self.window)
        return (ReleasedGradients if self.release_gradients else KeptGradients)(store, self._members_weakly())

    def _outdated(self) -> bool:
        """Return whether, before the first step, all parameters were replaced, or one was moved or converted. A state
        that was loaded, or a gradient that is on the host, would be lost: then the step names the change."""
        found = self._member_ids()
        if self._source is None or not found or any(record.has_state for record in self.records):
            return False
        known = [record for key, record in self.by_id.items() if key in found]
        moved = self.offload.alone and any(record.moved for record in known)
        return not known or (moved and not self.window.arrived)

    def _lay_out_anew(self) -> None:
        """Lay out the parameters that are in the groups now: Accelerate makes the optimizer first, then shards the
        model with FSDP2, and others move or convert the model then. If this raises, nothing was changed."""
        fresh = OptimizerCore(self.groups, self.family, self.offload, self.release_gradients, self.window)
        for place, group in enumerate(self.groups()):
            fresh.register(group, place)
        fresh.end_building()
        fresh.store.foresee(_OptimizerForecast(self))
        if self._source is not None:
            fresh.store.set_recorders(self._source.store.tiles.recorders)
            if fresh.store.tiles.streams is self._source.store.tiles.streams:
                self._source.remove_hooks()  # both use the copy streams that the user gave
            else:
                self.close()
            self._source.replaced_by = fresh._source
        fresh.source.members = self._members_weakly()
        self.handed_out.states.clear()
        self._repeated = None
        self.window.lose_gradients()
        self._source, self.by_id, self.parameters = fresh._source, fresh.by_id, fresh.parameters

    def close(self) -> None:
        """Wait for work under way, remove the hooks, and end the threads."""
        for source in (self._source, self._nothing):
            if source is not None:
                source.close()

    # -- the accumulation window ----------------------------------------------

    @property
    def gradients_arrived(self) -> int:
        """Number of gradients that hooks took to the host in this window (``release_gradients=True``)."""
        return sum(self.window.arrived.values())

    @torch.no_grad()
    def window_gradients(self, *, reading: bool = False) -> Mapping[int, Tensor | None]:
        """Return the gradients of this window, as agreed by all ranks, by the index of their record. Each is flat and
        on the device, or None if the store has it. ``reading``: no step follows, so that parameters may be whole."""
        if self._agreed is not None:
            return self._agreed
        for record in self.records[:1]:  # all are on one device
            refuse_capture(record.device)
        found, failure = {}, None
        try:
            found = self._collect()
        except Exception as error:
            failure = error  # agree() tells the other ranks, which raise too
        try:
            return self.store.agree(found, failure, reading=reading)
        finally:
            del failure  # its traceback has this frame: a cycle, with all state in it

    @contextlib.contextmanager
    def one_agreement(self) -> Iterator[Mapping[int, Tensor | None]]:
        """Agree on :meth:`window_gradients` once for a ``with`` block, in which there is no backward."""
        self._agreed = self.window_gradients()
        try:
            yield self._agreed
        finally:
            self._agreed = None

    def _collect(self) -> dict[int, Tensor | None]:
        """Return the gradients that this process found, after every check that could end the step."""
        source = self.source  # first: parameters may have been replaced
        self._check_once()
        self._check_groups()
        for group in self.groups():
            self.records_of(group)  # takes up what the user put into it, before gradients are looked for
        gradients = source.collect()
        for record in self._present():
            if record.parameter.requires_grad or record.index in gradients:
                record.check()
        return gradients

    def _present(self) -> list[ParameterRecord]:
        """Return the records of the parameters that are in the groups now, in the order of their index."""
        members = self.members()
        return [record for record in self.records if record.index in members]

    def zero_grad(self, how: Ended = Ended.DISCARDED) -> None:
        """End the window without a step, and set ``.grad`` to None."""
        if self.empty:
            self.window.end(how)
        else:
            self.source.zero_grad(how)

    def begin_load(self) -> None:
        """Prepare to write a whole state, which replaces a broken one."""
        if not self.empty and self.store.tiles.broken is not None:
            self.store.states.begin_load()  # a broken step loses its window; otherwise the window goes on, as in torch

    @contextlib.contextmanager
    def loading(self) -> Iterator[OptimizerCore]:
        """Write a whole state in the block. If that fails half way, the state is broken until one is loaded."""
        whole = False
        try:
            self.begin_load()
            with deferred_interrupts():
                yield self
                whole = True
        except BaseException as failure:
            if not whole:
                self.store.states.load_failed(f"load_state_dict ended half way: {type(failure).__name__} {failure}")
            raise

    # -- the step -------------------------------------------------------------

    def step(self) -> None:
        """Step every parameter that has a gradient, and publish the new values."""
        if self.empty:
            self.window.end(Ended.STEPPED)
            return
        source, store = self.source, self.store
        store.states.check_usable()
        if self._stepped_again():
            return
        gradients = self.window_gradients()
        records = {record.index: record for record in self.records}
        with store.preparing({record.name: record.values() for record in self._present()} if debugging() else {}):
            self.take_edits()
            scale = self.window.scale(source.fingerprint)
            self._name_states(store)
            steps: dict[int, ParameterStep] = {}
            histories: dict[int, History] = {}
            for record, rule, history in self.planned(gradients):
                steps[record.index] = ParameterStep(rule, record.values(), gradients[record.index])
                histories[record.index] = history
            entries = self.window.balance(
                (index, each.name, each.parameter.numel(), store.reduced(index), int(index in steps))
                for index, each in records.items()
            )
            self._adoption.adopt(store, self._present(), steps)
            for index in steps:
                fill_initial(records[index], store)

        def published() -> None:
            first = [records[index] for index in steps if not records[index].has_state]
            for index, step in steps.items():
                records[index].publish(step.target, histories[index])
            for index in steps:  # after all: slices of one tensor count each other's writes
                records[index].mark_published()
            self._adoption.published(store, records, steps)
            if first:
                self.handed_out.came(first, self)
            self._begun = True

        store.commit(steps, scale, published)
        self.window.entries = entries
        if self.handed_out.copies:
            self.handed_out.follow(self, steps.keys())
        if self._repeated is None or not self._repeated.describes(self.groups()):
            self._repeated = repeated_step(self.family, source, self.groups(), map(self.records_of, self.groups()))

    def take_edits(self) -> None:
        """Take the user's edits of states that were handed out, before the state is used."""
        if self.handed_out.copies or self.handed_out.assigned:
            self.handed_out.write_back(self)

    def _stepped_again(self) -> bool:
        """Step with :class:`RepeatedStep`, and return whether that was possible."""
        handed_out = self.handed_out.copies or self.handed_out.assigned  # the regular step reads edits
        if self._repeated is None or self._agreed is not None or handed_out or debugging():
            return False
        self.store.agree({})
        self._check_groups()
        self._name_states(self.store)
        stepped = self._repeated.step(self.groups(), lambda: self.window.scale(self.source.fingerprint))
        if stepped is None:
            return False
        self.window.end(Ended.STEPPED)
        entries = dict.fromkeys(self.parameters, Entry(0, 0, 0))
        self.window.entries = entries | dict.fromkeys([record.index for record in stepped], Entry(0, 0, 1))
        return True

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

    def _name_states(self, store: Store) -> None:
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


class _OptimizerForecast(Forecast):
    """Forecast of a step with the present parameter groups, without clipping; does not keep the core alive."""

    def __init__(self, core: OptimizerCore) -> None:
        self._window = core.window
        self._core = weakref.ref(core)

    def scale(self) -> Scale:
        return self._window.unclipped

    def rules(self) -> Mapping[int, HostRule]:
        core = self._core()
        return {} if core is None else {record.index: rule for record, rule, _ in core.planned(core.parameters)}
