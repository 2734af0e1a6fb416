"""``optimizer.state``: copies of the state that users have, and how their edits get into the state buffers.

State buffers move, so users get copies. A copy is watched as long as anybody may edit it: its edits are written back
before the state is used, and a step that changes the state changes the copy, too.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.optim.dtensor import flat, is_sharded, like, present
from longshore.optim.parameters import ParameterRecord
from longshore.optim.state import StateOwner, checked_state, clear_state, write_state
from longshore.tiles import MASTER

_LEAST_BYTES = 1 << 26
"""Bytes of copies that are handed out before those that nobody has any more are looked for."""


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return flat values in the shape of a parameter, and in its order in memory, as torch makes its states: torch's
    fused kernels read both as they lie."""
    shaped = values.view(parameter.shape)
    if is_sharded(parameter) or parameter.is_contiguous():
        return shaped
    return torch.empty_like(parameter, dtype=values.dtype, device=values.device, requires_grad=False).copy_(shaped)


def is_plain(value: Any, record: ParameterRecord, single: bool = False) -> bool:
    """Return whether a tensor can be watched as it is; ``single``: it is a number."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.dtype == torch.float32
        and value.shape == (() if single else record.kept.shape)
        and value.is_contiguous()
        and not value.is_neg()
    )


class StateCopy:
    """A copy of one state of a parameter that was handed out.

    Args:
        memory: the copy's memory, in a tensor of its own.
        handed: the tensor that the user has.
    """

    def __init__(self, memory: Tensor, handed: Tensor) -> None:
        self.memory = memory
        self.handed = weakref.ref(handed)
        self.checksum: int | None = None
        """Checksum of a copy that a step left behind, since only all ranks together can read the new state."""

    @property
    def values(self) -> Tensor:
        """The values, flat."""
        return flat(self.memory)

    def update(self, values: Tensor) -> None:
        self.memory.copy_(values.view(self.memory.shape))

    @property
    def in_use(self) -> bool:
        """Whether a tensor, a view or an array of the user's is over this memory."""
        # Two are ours: ``memory``, and the storage that is asked. It has a name, since torch 2.8 counts it only as long
        # as it lives, and newer ones as long as a tensor does.
        storage = self.memory.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore

    def check_unedited(self, record: ParameterRecord, name: str) -> None:
        """Raise ParameterError if the copy was edited after a step had left it behind."""
        if self.checksum != self.compute_checksum():
            raise ParameterError(
                f"parameter {record.name}: {name}, which was read from optimizer.state before a step, was edited after "
                "it. The state is spread over ranks, and such a copy keeps the values before the step: read "
                "optimizer.state again after each step, and edit that"
            )

    def compute_checksum(self) -> int:
        return zlib.crc32(self.memory.numpy().tobytes())


def numbers_of(record: ParameterRecord) -> dict[str, float]:
    return {"step": float(record.history.step), **dict(record.history.scalars)}


def read_state(record: ParameterRecord, name: str, members: StateOwner) -> Tensor:
    """Return a state, flat: float32, on the CPU."""
    numbers = numbers_of(record)
    if name in numbers:
        return torch.tensor([numbers[name]], dtype=torch.float32, device="cpu")
    return members.store.states.read(record.index, name)


def differs(record: ParameterRecord, name: str, values: Tensor, members: StateOwner) -> bool:
    if name in numbers_of(record):
        return not torch.equal(values.view(torch.int32), read_state(record, name, members).view(torch.int32))
    return members.store.states.differs(record.index, name, values)


def write_edits(record: ParameterRecord, state: dict[str, Any], members: StateOwner) -> None:
    state |= checked_state(record, {key: state[key] for key in state.keys() & numbers_of(record)})
    # Before the first step, a master alone is meant; one in a whole state came from another parameter.
    meant = MASTER in state and ((len(state) == 1 and not record.has_state) or not _written(record, members))
    master = state[MASTER] if meant else None
    if master is not None and record.held.numel() != master.numel():
        raise ParameterError(
            f"parameter {record.name}: its master was edited in optimizer.state, and this process has a shard of the "
            "parameter: use longshore.utils.safe_set_full_fp32_param()"
        )
    write_state(record, members, state)
    if master is not None:
        record.publish_values(master)  # the master is the parameter with more digits: whoever edits it means both


def _written(record: ParameterRecord, members: StateOwner) -> bool:
    """Return whether the parameter was written, which then counts (law 10)."""
    if not record.changed or not record.has_state or not members.store.alone:  # ranks have to decide alike
        return record.changed
    return record.has_master and members.store.states.count_differing(record.index, record.values()) > 0


class UserState:
    """Everything that the user of one optimizer has of its state, or has put into it, by ``id(parameter)``."""

    def __init__(self) -> None:
        self.copies: dict[int, dict[str, StateCopy]] = {}
        self.assigned: dict[int, dict[str, Any]] = {}
        """States that were assigned and are not written yet."""
        self.entries: dict[int, dict[str, Any]] = {}
        """Entries of a parameter's state that are the user's."""
        self.states: weakref.WeakValueDictionary[int, ParameterState] = weakref.WeakValueDictionary()
        """The mappings that users have."""
        self.touched: dict[int, bool] = {}
        """The parameters whose mappings were asked for: as in torch's defaultdict, they are there from then on. In the
        order in which they came, together with those that have a state."""
        self.others: dict[Any, Any] = {}
        """Entries of ``optimizer.state`` whose keys are no tensors."""
        self.unplaced: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        """States of tensors that are not in the groups, or not yet."""
        self.saved: set[int] | None = None
        """Indices of the parameters whose states a ``state_dict()`` takes just now; None: of all."""
        self._new_bytes, self._most_bytes = 0, _LEAST_BYTES

    @contextlib.contextmanager
    def saving(self, members: set[int] | None) -> Iterator[None]:
        """Leave parameters that are not ``members`` out of :attr:`TiledOptimizer.state` within the block."""
        self.saved = members
        try:
            yield
        finally:
            self.saved = None

    def keep(self, record: ParameterRecord, entries: Mapping[str, Any]) -> None:
        """Keep entries of a parameter's state that are the user's."""
        if entries:
            self.entries.setdefault(id(record.parameter), {}).update(entries)

    def place(self, members: StateOwner) -> None:
        """Give the parameters that were put into the groups the states that were set for them before."""
        for key in [key for key in self.unplaced if key in members.by_id]:
            parameter, state = self.unplaced.pop(key)
            StateMap(members)[parameter] = state

    def adopt(self, state: Mapping[Any, Any], members: StateOwner) -> None:
        """Watch the tensors of another optimizer whose state, which was loaded, is this one's now: scripts may have
        them."""
        # What torch's Adagrad keeps of frozen parameters, from its constructor on, was not loaded.
        for record in [each for each in members.records if each.has_state]:
            for name, value in state.get(record.parameter, {}).items():
                if name in record.family.entries and is_plain(value, record, single=name in numbers_of(record)):
                    self.copies.setdefault(id(record.parameter), {})[name] = StateCopy(value.detach(), value)

    def came(self, records: Iterable[ParameterRecord], members: StateOwner) -> None:
        """Note which of these parameters, stepped for the first time, have a state now, behind those that had one."""
        for record in records:
            if len(ParameterState(record, members)) > 0:
                self.touched.setdefault(id(record.parameter), True)

    def forget(self, record: ParameterRecord) -> None:
        """Forget copies and assignments of a parameter's state, which is about to be replaced."""
        for kept in (self.copies, self.assigned, self.entries, self.touched):
            kept.pop(id(record.parameter), None)

    def hand_out(self, record: ParameterRecord, name: str, members: StateOwner) -> Tensor:
        """Return a copy of a state: float32, on the CPU, of the parameter's shape (numbers: 0-dim)."""
        members.store.states.check_usable()
        record.check()
        copy = self.copies.get(id(record.parameter), {}).get(name)
        if copy is None:
            self._make_room(record, members)
            values = read_state(record, name, members)
            memory = values if name in numbers_of(record) else in_order_of(record.kept.detach(), values)
        else:
            if copy.checksum is not None:
                copy.check_unedited(record, name)
                copy.update(read_state(record, name, members))
                copy.checksum = None
            handed = copy.handed()
            if handed is not None:
                return handed
            memory = copy.memory
        if name in numbers_of(record):
            handed = memory.view(())
        else:
            handed = like(record.parameter, memory.detach()) if record.keeps_shard else memory.detach()
        self.copies.setdefault(id(record.parameter), {})[name] = StateCopy(memory.detach(), handed)
        return handed

    def _make_room(self, record: ParameterRecord, members: StateOwner) -> None:
        self._new_bytes += 4 * record.kept.numel() + 1024
        if self._new_bytes > self._most_bytes:
            self.write_back(members)
            held = [copy for copies in self.copies.values() for copy in copies.values()]
            self._new_bytes = sum(copy.memory.nbytes + 1024 for copy in held)
            self._most_bytes = max(_LEAST_BYTES, 2 * self._new_bytes)

    def write_back(self, members: StateOwner) -> None:
        """Write all edits to the state buffers, and forget the copies that are not in use any more.

        Raises:
            ValueError: an assigned value is no state of the parameter.
            ParameterError: a copy was edited that a step had left behind.
        """
        for key in list(self.assigned):
            record, assigned = members.by_id[key], self.assigned[key]
            write_edits(record, checked_state(record, assigned), members)
            del self.assigned[key]
            for name, value in assigned.items():
                if is_plain(value, record) and name not in numbers_of(record):
                    # As in torch, the tensor is the state now.
                    self.copies.setdefault(key, {})[name] = StateCopy(value.detach(), value)
        for key in list(self.copies):
            record, copies = members.by_id[key], self.copies[key]
            for name, copy in list(copies.items()):
                if copy.checksum is not None:
                    copy.check_unedited(record, name)
                elif differs(record, name, copy.values, members):
                    write_edits(record, {name: copy.values}, members)
                if not copy.in_use:
                    del copies[name]
            if not copies:
                del self.copies[key]

    def follow(self, members: StateOwner, changed: Collection[int]) -> None:
        """Bring copies up to date after the states of the parameters with these indices changed: a step of torch's
        changes the tensors that users have."""
        for key, copies in self.copies.items():
            record = members.by_id[key]
            for name, copy in list(copies.items()) if record.index in changed else ():
                if not copy.in_use:
                    del copies[name]  # it would be handed out again, with the values before the step
                elif copy.checksum is not None:
                    continue
                elif name in numbers_of(record) or members.store.alone:
                    copy.update(read_state(record, name, members))
                else:
                    copy.checksum = copy.compute_checksum()


class ParameterState(MutableMapping[str, Any], dict[str, Any]):  # pyright: ignore[reportGeneralTypeIssues]
    """One parameter's states as torch names them (Adam: ``step``, ``exp_avg``, ``exp_avg_sq``), ``master`` if the
    parameter is not float32, and whatever else users put into it.

    Reading a state gives a tensor: float32, on the CPU, of the parameter's shape (``step`` and other single numbers:
    0-dim). Editing it in place, or setting a key, changes the state.
    """

    # The dictionary of the base class stays empty: it is a base for isinstance() alone.

    def __init__(self, record: ParameterRecord, members: StateOwner) -> None:
        self._record = record
        self._members = members
        self._handed_out: UserState = members.user_state
        self._left: dict[str, Any] | None = None
        """All entries, once they were taken out of the optimizer's state."""

    def _names(self) -> tuple[str, ...]:
        """Return the names of the states that are in the state buffers or in the parameter's history."""
        record, family = self._record, self._record.family
        if not record.has_state:
            return ()
        step = ("step",) if family.keeps_step else ()
        states = (name for name in family.states if name in record.history.states)
        scalars = (name for name, _ in record.history.scalars)
        return (*step, *states, *scalars, *(() if record.dtype == torch.float32 else (MASTER,)))

    def _set(self) -> dict[str, Any]:
        """Return the entries that users have set."""
        key = id(self._record.parameter)
        return {**self._handed_out.assigned.get(key, {}), **self._handed_out.entries.get(key, {})}

    def __getitem__(self, key: str) -> Any:
        entries = self._set() if self._left is None else self._left
        if key in entries or self._left is not None:
            return entries[key]
        if key not in self._names():
            raise KeyError(key)
        return self._handed_out.hand_out(self._record, key, self._members)

    def __setitem__(self, key: str, value: Any) -> None:
        if self._left is not None:
            self._left[key] = value
            return
        user_state, record = self._handed_out, self._record
        if key not in record.family.entries:
            checked_state(record, {key: value})  # not a state of another optimizer
            user_state.keep(record, {key: value})
            return
        if value is None and key in record.family.optional_states:
            self.pop(key, None)
            return
        # Scripts that prune or grow parameters set states of another shape, and move all to the new parameter then.
        user_state.copies.get(id(record.parameter), {}).pop(key, None)
        user_state.assigned.setdefault(id(record.parameter), {})[key] = value

    def __delitem__(self, key: str) -> None:
        if self._left is not None:
            del self._left[key]
            return
        user_state, identity = self._handed_out, id(self._record.parameter)
        found = [kept for kept in (user_state.entries, user_state.assigned) if key in kept.get(identity, ())]
        for kept in found:
            del kept[identity][key]
        if key not in self._names():
            if not found:
                raise KeyError(key)
            return
        if key not in self._record.family.optional_states:
            raise TypeError(f"{key!r} is part of the optimizer's state and cannot be deleted; set it instead")
        user_state.copies.get(identity, {}).pop(key, None)
        history = self._record.history
        self._record.history = history._replace(states=history.states - {key})

    def clear(self) -> None:
        if self._left is None:
            clear_state(self._record, self._members)
        else:
            self._left.clear()

    def leave(self) -> None:
        """Take all entries out of the optimizer's state: it is about to be cleared, and this mapping is in use."""
        self._left = {key: self[key] for key in self}

    def __iter__(self) -> Iterator[str]:
        if self._left is not None:
            return iter(self._left)
        return iter(dict.fromkeys((*self._names(), *self._set())))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __or__(self, other: Any) -> dict[str, Any]:
        return dict(self) | other

    def __ror__(self, other: Any) -> dict[str, Any]:
        return other | dict(self)

    def __ior__(self, other: Any) -> ParameterState:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary with the same entries."""
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class StateMap(MutableMapping[Any, Any], dict[Any, Any]):  # pyright: ignore[reportGeneralTypeIssues]
    """Mapping from the parameters that were stepped or loaded to their state, and from other keys that users set."""

    def __init__(self, members: StateOwner) -> None:
        self._members = members
        self._handed_out: UserState = members.user_state

    def _record(self, parameter: Tensor) -> ParameterRecord:
        record = self._members.by_id.get(id(parameter))
        if record is None:
            raise KeyError("not a parameter of this optimizer")
        return record

    def _held(self, key: Any) -> Any:
        """Return a key, in place of a parameter that was sharded the one that replaced it."""
        return present(key) if isinstance(key, Tensor) and id(key) not in self._members.by_id else key

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, Tensor):
            return self._handed_out.others.setdefault(key, {})  # torch's is a defaultdict
        key = self._held(key)
        states = self._handed_out.states
        found = states.get(id(key))
        if found is None:
            if id(key) not in self._members.by_id and not self._members.empty:
                self._members.indices()  # takes up parameters that were put into the groups
            if id(key) in self._handed_out.unplaced:
                return self._handed_out.unplaced[id(key)][1]
            found = states[id(key)] = ParameterState(self._record(key), self._members)
        if id(key) not in self._handed_out.touched:
            self._note_order()  # of those that have a state before this one is asked for
            self._handed_out.touched[id(key)] = True
        return found

    def _note_order(self) -> None:
        touched = self._handed_out.touched
        for record in self._members.records:
            if id(record.parameter) not in touched and record.parameter in self:
                touched[id(record.parameter)] = True

    def __setitem__(self, key: Any, state: Any) -> None:
        if not isinstance(key, Tensor):
            self._handed_out.others[key] = state
            return
        key = self._held(key)
        if id(key) not in self._members.by_id:
            # Scripts that replace a parameter set its state before or after they put it into its group.
            self._handed_out.unplaced[id(key)] = key, dict(state)
            if not self._members.empty:
                self._members.indices()
            return
        record, entries = self._record(key), dict(state)
        self.pop(key, None)
        self._handed_out.states[id(key)] = found = ParameterState(record, self._members)
        found.update(entries)
        self._handed_out.write_back(self._members)

    def __delitem__(self, key: Any) -> None:
        user_state = self._handed_out
        if not isinstance(key, Tensor):
            del user_state.others[key]
            return
        key = self._held(key)
        if user_state.unplaced.pop(id(key), None):
            return
        if key not in self:
            raise KeyError(key)
        record = self._record(key)
        found = user_state.states.pop(id(key), None)
        if found is not None:
            found.leave()
        clear_state(record, self._members)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, Tensor):
            return key in self._handed_out.others
        key = self._held(key)
        record = self._members.by_id.get(id(key))
        if id(key) in self._handed_out.unplaced:
            return True
        touched = id(key) in self._handed_out.touched
        return record is not None and (touched or len(ParameterState(record, self._members)) > 0)

    def __iter__(self) -> Iterator[Any]:
        self._note_order()
        among, by_id = self._handed_out.saved, self._members.by_id
        records = [by_id[key] for key in self._handed_out.touched if key in by_id]
        yield from [record.parameter for record in records if among is None or record.index in among]
        if among is None:
            yield from [parameter for parameter, _ in self._handed_out.unplaced.values()]
        yield from list(self._handed_out.others)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[Any, Any]:
        """Return a plain dictionary with the same entries."""
        return dict(self)
