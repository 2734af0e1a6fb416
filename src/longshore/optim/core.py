"""What stands behind one optimizer: its parameters, where their state and gradients are, and what a step does.

:class:`~longshore.optim.host_optimizer.HostOptimizer` is the face that ``torch.optim`` prescribes; engines, checkpoints
and traces use the core.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import LongshoreError, ParameterError
from longshore.host import Forecast, ParameterStep, ParameterStore, Ranges, annotating, debugging
from longshore.kernels import HostRule, Scale
from longshore.optim.clipping import Clipping
from longshore.optim.family import History, RuleFamily, planned, records_of
from longshore.optim.gradients import GradientSource, KeptGradients, ReleasedGradients
from longshore.optim.offload import Placement
from longshore.optim.parameters import ParameterRecord, check_no_shared_memory, check_parameter


class Entry(NamedTuple):
    """What became of one parameter's gradients of a window."""

    name: str
    arrived: int
    """Gradients that backward produced on this rank."""
    reduced: int | None
    """Gradients, each of all ranks together, that reached what this rank steps; None: it steps nothing of this one."""
    applied: int
    """Steps that were made with them."""


class OptimizerCore:
    """The parameters of one optimizer, with their store.

    Args:
        groups: the optimizer's ``param_groups``, looked up whenever they are needed.
        family: the rule.
        offload: where the state is.
        release_gradients: whether gradients leave for the host during backward.
    """

    def __init__(
        self,
        groups: Callable[[], list[dict[str, Any]]],
        family: RuleFamily,
        offload: Placement,
        release_gradients: bool,
    ) -> None:
        # Fixed.
        self.family = family
        self.offload = offload
        self.release_gradients = release_gradients
        self._groups = groups
        # Grow with parameter groups.
        self._device: torch.device | None = None
        self._store: ParameterStore | None = None
        self._source: GradientSource | None = None
        self.by_id: dict[int, ParameterRecord] = {}
        """By ``id(parameter)``; each record keeps its parameter alive."""
        self._parameters: dict[int, Tensor] = {}
        """By the index of the record."""
        self._begun = False
        """Whether a step was applied."""
        self._waiting: list[ParameterRecord] | None = []
        """While the optimizer is built: a tile may hold several groups, so they are laid out together."""
        # Change with each window.
        self.clipping = Clipping()
        self.ledger: Mapping[int, Entry] = {}
        """The account of the last window's gradients."""
        self.when_discarded: Callable[[], None] = lambda: None

    # -- parameters -----------------------------------------------------------

    @property
    def store(self) -> ParameterStore:
        """Where the state is."""
        return self.parts()[0]

    @property
    def records(self) -> list[ParameterRecord]:
        """What is known of each parameter; a record's index is its place."""
        return list(self.by_id.values())

    @property
    def laid_out(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def register(self, group: Mapping[str, Any], place: int) -> None:
        """Take up the parameters of a new group.

        Raises:
            ValueError: a parameter that cannot be honoured, by name; none was taken up.
        """
        names = group.get("param_names")
        records = []
        device = self._device
        for position, parameter in enumerate(group["params"]):
            name = names[position] if names else f"{place}.{position}"
            check_parameter(parameter, name, device, self.offload.takes_shards)
            device = parameter.device
            records.append(ParameterRecord(len(self.by_id) + position, name, parameter, self.offload))
        if self._waiting is None:
            check_no_shared_memory([*self.by_id.values(), *records])
            self._lay_out(records)
        else:
            self._waiting.extend(records)
        self.by_id.update((id(record.parameter), record) for record in records)
        self._device = device

    def lay_out_waiting(self) -> None:
        """The optimizer has all groups that it was built with.

        Raises:
            ValueError: they have no parameter, or two that share memory.
        """
        waiting, self._waiting = self._waiting or [], None
        if not waiting:
            raise ValueError("optimizer got parameter groups without a single parameter")
        check_no_shared_memory(waiting)
        self._lay_out(waiting)

    def _lay_out(self, records: list[ParameterRecord]) -> None:
        if not records:
            return
        self._parameters.update((record.index, record.parameter) for record in records)
        if self._store is None or self._source is None:
            self._store = self.offload.make_store(records[0].device, self.release_gradients, self._parameters)
            self._source = (ReleasedGradients if self.release_gradients else KeptGradients)(self._store)
            if annotating():
                self._store.set_recorders([Ranges()])
            self._store.foresee(_OptimizerForecast(self.clipping, self._planned_rules))
        self._name_states(self._store)
        self._source.register(records)

    def parts(self) -> tuple[ParameterStore, GradientSource]:
        if not self._begun and self._replaced():
            self._lay_out_anew()
        if self._store is None or self._source is None:
            raise ValueError("the optimizer has no parameters")
        return self._store, self._source

    def _replaced(self) -> bool:
        """Whether others were put in the place of all parameters before anything was stepped."""
        found = {id(parameter) for group in self._groups() for parameter in group["params"]}
        return (
            bool(found) and found.isdisjoint(self.by_id) and not any(record.has_state for record in self.by_id.values())
        )

    def _lay_out_anew(self) -> None:
        """Accelerate makes the optimizer first, then puts the model on FSDP2, and its shards into the groups."""
        former = self._store, self._source, self._device, self.by_id, self._parameters
        self._store, self._source, self._device, self.by_id, self._parameters = None, None, None, {}, {}
        self._waiting = []
        try:
            for place, group in enumerate(self._groups()):
                self.register(group, place)
            self.lay_out_waiting()
            if self._store is not None and former[0] is not None:
                self._store.set_recorders(former[0].recorders)
        except BaseException:
            self._store, self._source, self._device, self.by_id, self._parameters = former
            raise
        finally:
            self._waiting = None
        _close(former[:2])

    def close(self) -> None:
        """Wait for what is under way, remove the hooks, and let go of threads."""
        _close((self._store, self._source))

    # -- the accumulation window ----------------------------------------------

    def look_again(self) -> None:
        """Take up parameters that were frozen, or not gathered, until now."""
        self.parts()[1].look_again()

    @property
    def gradients_arrived(self) -> int:
        """How many gradients hooks took to the host in this window (``release_gradients=True``)."""
        return sum(self.parts()[1].produced.values())

    @torch.no_grad()
    def window_gradients(self) -> Mapping[int, Tensor | None]:
        """The gradients of this window by the index of their record, agreed by all ranks: flat, on the device, or
        None where the store holds it."""
        found, failure = {}, None
        try:
            found = self._collect()
        except Exception as error:
            failure = error  # the other ranks raise, too
        return self.store.agree(found, failure)

    def _collect(self) -> dict[int, Tensor | None]:
        """The gradients that this process found, after every check that could end the step."""
        for group in self._groups():
            self.family.check_group(group)
            records_of(group, self.by_id)
        gradients = self.parts()[1].collect()
        for record in self.by_id.values():
            if record.parameter.requires_grad or record.index in gradients:
                record.check()
        return gradients

    def discard(self) -> None:
        """Discard the window; ``.grad`` is None afterwards."""
        self.parts()[1].zero_grad()
        self.forget_window()

    def forget_window(self) -> None:
        """The window was discarded."""
        self.clipping.reset()
        self.when_discarded()

    def begin_load(self) -> None:
        """A whole state is about to be written: the end of a broken one."""
        store, source = self.parts()
        if store.broken is not None:
            store.begin_load()
            source.consumed()  # the window went down with the step; otherwise it goes on, as in torch
            self.forget_window()

    def scale(self) -> Scale:
        """What the window's gradients are multiplied by, as far as is known."""
        return self.clipping.scale_for(self.parts()[1].fingerprint)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip the window, whose gradients have this norm."""
        self.clipping.clip(norm, max_norm, self.parts()[1].fingerprint())

    def shards(self) -> Mapping[int, Tensor]:
        """The parameters of which the store knows this process's part only."""
        return self.offload.shards_among(self._parameters) if self.offload.keeps_shards else {}

    # -- the step -------------------------------------------------------------

    def step(self) -> None:
        """Step every parameter that has a gradient, and publish the new values."""
        store, source = self.parts()
        store.check_usable()
        gradients = self.window_gradients()
        records = {record.index: record for record in self.by_id.values()}
        with store.preparing({record.name: record.values() for record in records.values()} if debugging() else {}):
            scale = self.clipping.scale_for(source.fingerprint)
            self._name_states(store)
            steps: dict[int, ParameterStep] = {}
            histories: dict[int, History] = {}
            for record, rule, history in self._planned(gradients):
                steps[record.index] = ParameterStep(rule, record.values(), gradients[record.index])
                histories[record.index] = history
            entries = _balance(records.values(), source.produced, steps, store)
            _adopt_masters(store, records.values(), steps)
            self._begin_states(store, (records[index] for index in steps))

        def published() -> None:
            for index, step in steps.items():
                records[index].publish(step.target, histories[index])
            source.consumed()
            self.clipping.reset()
            self._begun = True

        store.commit(steps, scale, published)
        self.ledger = entries

    def _planned_rules(self) -> dict[int, HostRule]:
        return {record.index: rule for record, rule, _ in self._planned(range(len(self.by_id)))}

    def _planned(self, among: Container[int]) -> Iterator[tuple[ParameterRecord, HostRule, History]]:
        return planned(self._groups(), self.by_id, self.family, self.parts()[0].local.arrays, among)

    def _name_states(self, store: ParameterStore) -> None:
        self.have_states(store, {name for group in self._groups() for name in self.family.states_of(group)})

    def have_states(self, store: ParameterStore, names: Collection[str]) -> None:
        """Have these state arrays, besides those that the store has."""
        local = store.local
        if not all(name in local.arrays for name in names):
            local.set_states([name for name in self.family.states if name in names or name in local.arrays])

    def make_room(self, record: ParameterRecord) -> None:
        """Lay out a parameter that the store does not have yet."""
        self.parts()[1].watch([record])

    def _begin_states(self, store: ParameterStore, records: Iterable[ParameterRecord]) -> None:
        """Fill the states that are not zero before a first step, of parameters that are about to make one."""
        for record in records:
            for name, value in self.family.initial(record.history).items():
                store.write_state(record.index, name, torch.full((1,), value).expand(record.kept.numel()))

    def refresh_masters(self) -> None:
        """Every element that is not the rounded master becomes the master."""
        store = self.store
        for record in self.by_id.values():
            if record.has_master:
                record.check()
                store.adopt(record.index, record.values(), keep_matching=True)
                record.mark_published()


class _OptimizerForecast(Forecast):
    """Groups as they are now, and no clipping.

    Args:
        clipping: of the optimizer's window.
        rules: a method of the core, which this does not keep alive.
    """

    def __init__(self, clipping: Clipping, rules: Callable[[], Mapping[int, HostRule]]) -> None:
        self._clipping = clipping
        self._rules = weakref.WeakMethod(rules)

    def scale(self) -> Scale:
        return self._clipping.unclipped()

    def rules(self) -> Mapping[int, HostRule]:
        rules = self._rules()
        return {} if rules is None else rules()


def _balance(
    records: Iterable[ParameterRecord],
    produced: Mapping[int, int],
    stepped: Collection[int],
    store: ParameterStore,
) -> dict[int, Entry]:
    """The accounts of a window that is about to be stepped.

    Raises:
        LongshoreError: a gradient was produced and would not be applied; nothing was stepped.
    """
    entries = {}
    for record in records:
        index = record.index
        arrived = produced.get(index, 0)
        reduced = store.reduced(index) if index in store else 0
        applied = int(index in stepped)
        lost = arrived > 0 and not applied
        missing = applied and reduced == 0 and arrived > 0 and record.parameter.numel() > 0
        if lost or missing:
            raise LongshoreError(
                f"parameter {record.name}: {arrived} gradients arrived in this window, {reduced} reached the step, and "
                f"{applied} steps would be made. Nothing was stepped. This is a bug in longshore: please report it; "
                "zero_grad() discards the window"
            )
        entries[index] = Entry(record.name, arrived, reduced, applied)
    return entries


def _adopt_masters(
    store: ParameterStore, records: Collection[ParameterRecord], steps: Mapping[int, ParameterStep]
) -> None:
    """Take up, before a step, what somebody else wrote into the parameters that it steps (law 10).

    Raises:
        ParameterError: with ``LONGSHORE_DEBUG=1``, a write that torch cannot see, by name.
        ValueError: two parameters were given the same memory, by name.
    """
    if debugging():
        _check_unseen_writes(store, records)
    changed = [record for record in records if record.index in steps and record.changed]
    if any(record.published is not None for record in changed):
        # p.data = q.data: two masters for the same memory.
        check_no_shared_memory(list(records))
    for record in changed:
        store.adopt(record.index, steps[record.index].target, keep_matching=record.has_master)
        record.has_master = True


def _check_unseen_writes(store: ParameterStore, records: Collection[ParameterRecord]) -> None:
    for record in records:
        if not record.has_master or record.changed:
            continue
        differing = store.count_differing(record.index, record.values())
        if differing:
            raise ParameterError(
                f"parameter {record.name}: {differing} of {record.parameter.numel()} elements were written where "
                "torch could not see it (p.data.copy_, NumPy, a custom kernel); call "
                "optimizer.refresh_master() after such writes"
            )


def _close(parts: Sequence[ParameterStore | GradientSource | None]) -> None:
    for part in reversed(parts):
        if part is not None:
            part.close()
