"""Core of one optimizer: its members, their accumulation window, and the step.

:class:`~longshore.optim.tiled_optimizer.TiledOptimizer` is the interface that ``torch.optim`` prescribes; engines,
checkpoints and traces use the core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from longshore.errors import debugging
from longshore.optim.external_writes import WriteDetector
from longshore.optim.family import History
from longshore.optim.grad_placeholder import refuse_capture
from longshore.optim.members import Members, Phase
from longshore.optim.repeated import RepeatedStep, repeated_step
from longshore.tiles import Ended, Entry, ParameterStep


class OptimizerCore:
    """The step of one optimizer, whose parameters are ``members``."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.window = members.window
        # These change with each window.
        self._writes = WriteDetector(members.offload.detect_writes)
        self._agreed: Mapping[int, Tensor | None] | None = None
        """Gradients that all ranks agreed on, in :meth:`cached_agreement`."""
        self._repeated: RepeatedStep | None = None
        """What can be told of the next step, if nothing changes until then."""

    # -- the accumulation window ----------------------------------------------

    @torch.no_grad()
    def window_gradients(self, *, reading: bool = False) -> Mapping[int, Tensor | None]:
        """Return the gradients of this window, as agreed by all ranks, by the index of their record. Each is flat and
        on the device, or None if the store has it. ``reading``: no step follows, so that parameters may be whole."""
        if self._agreed is not None:
            return self._agreed
        for record in self.members.records[:1]:  # all are on one device
            refuse_capture(record.device)
        found, failure = {}, None
        try:
            found = self._collect()
        except Exception as error:
            failure = error  # agree() tells the other ranks, which raise too
        try:
            return self.members.store.agree(found, failure, reading=reading)
        finally:
            del failure  # its traceback has this frame: a cycle, with all state in it

    @contextlib.contextmanager
    def cached_agreement(self) -> Iterator[Mapping[int, Tensor | None]]:
        """Agree on :meth:`window_gradients` once for a ``with`` block, in which there is no backward."""
        self._agreed = self.window_gradients()
        try:
            yield self._agreed
        finally:
            self._agreed = None

    def _collect(self) -> dict[int, Tensor | None]:
        """Return the gradients that this process found, after every check that could end the step."""
        source = self.members.source  # first: parameters may have been replaced
        self.members.check_once()
        self._check_groups()
        for group in self.members.groups():
            self.members.records_of(group)  # takes up what the user put into it, before gradients are looked for
        gradients = source.collect()
        for record in self.members.present():
            if record.parameter.requires_grad or record.index in gradients:
                record.check()
        return gradients

    def _check_groups(self) -> None:
        """Check the options of all groups, as scripts left them."""
        for group in self.members.groups():
            self.members.family.check_group(group)
            self.members.family.of(group).check_step(group)

    def zero_grad(self, how: Ended = Ended.DISCARDED) -> None:
        """End the window without a step, and set ``.grad`` to None."""
        if self.members.empty:
            self.window.end(how)
        else:
            self.members.source.zero_grad(how)

    # -- the step -------------------------------------------------------------

    def step(self) -> None:
        """Step every parameter that has a gradient, and publish the new values."""
        members, user_state = self.members, self.members.user_state
        if members.empty:
            self.window.end(Ended.STEPPED)
            return
        source, store = members.source, members.store
        store.states.check_usable()
        if self._stepped_again():
            return
        gradients = self.window_gradients()
        records = {record.index: record for record in members.records}
        with store.preparing({record.name: record.values() for record in members.present()} if debugging() else {}):
            if user_state.copies or user_state.assigned:
                user_state.write_back(members)
            scale = self.window.scale(source.fingerprint)
            members.name_states(store)
            steps: dict[int, ParameterStep] = {}
            histories: dict[int, History] = {}
            for record, rule, history in members.planned(gradients):
                steps[record.index] = ParameterStep(rule, record.values(), gradients[record.index])
                histories[record.index] = history
            entries = self.window.balance(
                (index, each.name, each.parameter.numel(), store.reduced(index), int(index in steps))
                for index, each in records.items()
            )
            self._writes.adopt(store, members.present(), steps)
            for index in steps:
                records[index].fill_initial(store)

        def published() -> None:
            first = [records[index] for index in steps if not records[index].has_state]
            for index, step in steps.items():
                records[index].publish(step.target, histories[index])
            for index in steps:  # after all: slices of one tensor count each other's writes
                records[index].mark_published()
            self._writes.published(store, records, steps)
            if first:
                user_state.came(first, members)
            members.phase = Phase.STEPPED

        store.commit(steps, scale, published)
        self.window.entries = entries
        if user_state.copies:
            user_state.follow(members, steps.keys())
        groups = members.groups()
        if not (members.release_gradients or (self._repeated is not None and self._repeated.describes(groups))):
            self._repeated = repeated_step(members.family, store, groups, map(members.records_of, groups))

    def _stepped_again(self) -> bool:
        """Step with :class:`RepeatedStep`, and return whether that was possible."""
        members, user_state = self.members, self.members.user_state
        edits = user_state.copies or user_state.assigned  # the regular step reads them
        if self._repeated is None or self._agreed is not None or edits or debugging():
            return False
        members.store.agree({})
        self._check_groups()
        members.name_states(members.store)
        stepped = self._repeated.step(members.groups(), lambda: self.window.scale(members.source.fingerprint))
        if stepped is None:
            return False
        self.window.end(Ended.STEPPED)
        entries = dict.fromkeys(members.parameters, Entry(0, 0, 0))
        self.window.entries = entries | dict.fromkeys([record.index for record in stepped], Entry(0, 0, 1))
        return True
