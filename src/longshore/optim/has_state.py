"""The part of an optimizer that has a state: reading it, and loading one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longshore.host import ParameterStore
from longshore.optim.clipping import Clipping
from longshore.optim.family import RuleFamily, records_of
from longshore.optim.gradients import GradientSource
from longshore.optim.loading import loadable_state, merged_group
from longshore.optim.parameters import ParameterRecord
from longshore.optim.state import StateAccess, StateMap, clear_state, write_state


class HasState(torch.optim.Optimizer):
    """``state`` in front of a store, ``load_state_dict``, and the end of a broken state."""

    # Of the optimizer that this is a part of.
    _family: RuleFamily
    _store: ParameterStore | None
    _records: dict[int, ParameterRecord]
    _clipping: Clipping
    _loading: dict[int, dict[str, Any]] | None
    when_discarded: Callable[[], None]

    def _parts(self) -> tuple[ParameterStore, GradientSource]:
        raise NotImplementedError

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its states as torch names them (and ``master``), looked up at each access."""
        return StateMap(self._records, self.state_access())

    def state_access(self) -> StateAccess:
        store, source = self._parts()
        return StateAccess(store, self._family, lambda record: source.watch([record]))

    @state.setter
    def state(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        if self._store is None:  # the base class, before it has parameters
            return
        state = self.state
        state.clear()
        for parameter, entries in value.items():
            state[parameter] = entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of its twin in ``torch.optim``.

        States and masters stay in float32 whatever the parameter's dtype.
        Where the state has no master, the parameter is the master. Also leaves
        a broken state.

        Raises:
            ValueError: the state does not fit, by name; nothing was changed.
        """
        # The base class would cast every tensor to the parameter's dtype; so it
        # gets the groups only, from a hook that runs after all of the user's.
        handle = self.register_load_state_dict_pre_hook(HasState._take_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    @staticmethod
    def _take_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(optimizer, HasState)
        records = [record for group in optimizer.param_groups for record in records_of(group, optimizer._records)]
        optimizer._loading = loadable_state(
            state_dict, optimizer.param_groups, optimizer.defaults, records, optimizer._family
        )
        return {**state_dict, "state": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._loading is None:
            raise TypeError("a longshore optimizer is restored with load_state_dict, not by unpickling")
        self.param_groups = [
            merged_group(group, mine, self.defaults, self._family)
            for group, mine in zip(state["param_groups"], self.param_groups, strict=True)
        ]
        self.begin_load()
        access = self.state_access()
        for record in self._records.values():
            clear_state(record, access.store)
            loaded = self._loading.get(record.index)
            if loaded:
                write_state(record, access, loaded)

    def begin_load(self) -> None:
        """A whole state is about to be written: the end of a broken one."""
        store, source = self._parts()
        if store.broken:
            store.begin_load()
            source.consumed()  # the window went down with the step; otherwise it goes on, as in torch
            self._clipping.reset()
            self.when_discarded()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer of longshore owns threads and pinned memory: copy its state_dict() instead")
