"""Checks of a ``state_dict``, and writing of states to the state buffers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore.interrupts import deferred_interrupts
from longshore.optim.dtensor import counterparts, flat, is_sharded, part_of
from longshore.optim.family import IMPLEMENTATION_FLAGS, History, RuleFamily, states_of_all_rules
from longshore.optim.gradients import GradientSource
from longshore.optim.parameters import ParameterRecord
from longshore.store import Store
from longshore.tiles import MASTER


class StateOwner(Protocol):
    """The parts of ``Members`` with which states are read and written."""

    family: RuleFamily
    by_id: dict[int, ParameterRecord]
    parameters: dict[int, Tensor]
    user_state: Any  # UserState

    @property
    def empty(self) -> bool: ...

    @property
    def store(self) -> Store: ...

    @property
    def records(self) -> list[ParameterRecord]: ...

    @property
    def source(self) -> GradientSource: ...

    def records_of(self, group: Mapping[str, Any]) -> list[ParameterRecord]: ...

    def have_states(self, store: Store, names: Collection[str]) -> None: ...

    def indices(self) -> set[int]: ...


def checked_state(record: ParameterRecord, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check a state that was given for one parameter, and return it as numbers and tensors; entries that are not part
    of any optimizer's state stay as they are.

    Raises:
        ValueError: there is a state of another optimizer, a tensor of another shape, or an invalid step count.
    """
    checked: dict[str, Any] = {}
    family = record.family
    for key, value in state.items():
        if key in family.entries and (key == "step" or key in family.scalars):
            checked[key] = _number(value, record.name, key)
        elif key in family.entries:
            # torch.distributed.checkpoint has {} for what a flattened state lacks.
            if not (value is None and key in family.optional_states) and not (key == MASTER and value == {}):
                checked[key] = _array(value, record, key)
        elif key in family.refused_states:
            raise ValueError(f"parameter {record.name}: {family.refused_states[key]}")
        elif key in states_of_all_rules():
            raise ValueError(
                f"parameter {record.name}: unknown state {key!r}; longshore keeps {', '.join(family.entries)} for this "
                f"optimizer, and {', '.join(map(str, state))} is another's: load it with the class that saved it, or "
                "begin anew from the weights"
            )
        else:
            checked[key] = value
    return checked


def as_parameter(value: Any, parameter: Tensor) -> Any:
    """Return an entry of a loaded state that is not ours with tensors in the parameter's dtype and on its device, as
    torch loads them."""
    if isinstance(value, Tensor):
        return value.to(parameter.device, parameter.dtype if parameter.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: as_parameter(part, parameter) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(as_parameter(part, parameter) for part in value)
    return value


def _number(value: Any, name: str, key: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key != "step" and known:
        return float(value)
    # Beyond 2**53 a double, in which bias corrections are computed, cannot tell two counts apart.
    if key == "step" and known and 0 <= value <= 2**53 and value % 1 == 0:
        return int(value)
    raise ValueError(f"parameter {name}: {key} is {value!r}, not a {'count' if key == 'step' else 'number'}")


def _array(value: Any, record: ParameterRecord, key: str) -> Tensor:
    found = type(value).__name__
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)} ({value.layout}, {value.device})"
        dense = value.layout == torch.strided and value.device.type != "meta"
        if dense and value.is_floating_point() and value.shape == record.shape:
            part = None if is_sharded(value) else value
            if record.keeps_shard:
                part = part_of(record.parameter, value)
            if part is not None:
                return part
            found += f" placed as {value.placements} on {value.device_mesh}"  # pyright: ignore
            if not record.keeps_shard:
                found += ", which is whole as value.full_tensor()"
    raise ValueError(f"parameter {record.name}: {key} is {found}, not a dense float tensor {list(record.shape)}")


def _is_initial(state: Mapping[str, Any], family: RuleFamily) -> bool:
    """Return whether the arrays of a state are those before the first step."""
    initial = family.initial(History())
    return all(bool((state[name] == initial.get(name, 0.0)).all()) for name in state.keys() & set(family.states))


def write_state(record: ParameterRecord, members: StateOwner, state: Mapping[str, Any]) -> None:
    """Write some of a parameter's state, as returned by :func:`checked_state`; unset states count as zero."""
    store, family = members.store, record.family
    members.user_state.keep(record, {key: value for key, value in state.items() if key not in family.entries})
    if not state.keys() & family.entries:
        return
    if record.index not in store.ownership:
        members.source.watch([record])
    arrays = state.keys() & {*family.states, MASTER}
    members.have_states(store, arrays)
    record.fill_initial(store)  # those that are not given stay as they are
    for key in arrays:
        store.states.write(record.index, key, flat(state[key].to(device="cpu", dtype=torch.float32)))
    history = record.history
    scalars = {**dict.fromkeys(family.scalars, 0.0), **dict(history.scalars)}
    record.history = History(
        state["step"] if "step" in state.keys() & family.entries else history.step,
        history.states
        | (arrays - {MASTER})
        | ({*store.tiles.tier.elementwise.names, family.matrix_state} & {*family.states} - family.optional_states),
        tuple((name, state.get(name, value)) for name, value in scalars.items()),
    )
    record.has_state = True
    if MASTER in state:
        record.has_master = True
        record.published = None  # compare with the parameter before the next step


def clear_state(record: ParameterRecord, members: StateOwner) -> None:
    """Reset a parameter's state to that before its first step; its master will be read from the parameter again.

    As in torch, tensors that were handed out are then no longer part of the state.
    """
    members.user_state.forget(record)
    # Clear it even if no step was completed: a step that failed half way wrote here too.
    members.store.states.clear(record.index)
    record.history = History()
    record.has_state = record.has_master = False
    record.published = None


def begin_load(members: StateOwner) -> None:
    """Prepare to write a whole state, which replaces a broken one."""
    if not members.empty and members.store.tiles.broken is not None:
        members.store.states.begin_load()  # a broken step loses its window; otherwise the window goes on, as in torch


class Loading:
    """A ``state_dict`` that the optimizer of ``members`` loads: checked as a whole in a hook, then written."""

    def __init__(self, members: StateOwner) -> None:
        self._members = members
        self._states: dict[int, dict[str, Any]] = {}
        self._others: dict[Any, Any] = {}

    def take(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the ``state_dict`` without its states, which are kept here; a pre-hook of ``load_state_dict``.

        Raises:
            ValueError: it does not fit; nothing was changed.
        """
        members, groups = self._members, optimizer.param_groups
        records = [record for group in groups for record in members.records_of(group)]
        self._states = loadable_state(state_dict, groups, optimizer.defaults, records, members.family)
        # torch.distributed.checkpoint names parameters by strings, in their groups too: those are not the user's own.
        named = {key for group in state_dict["param_groups"] for key in group["params"]}
        self._others = {k: v for k, v in state_dict["state"].items() if not (isinstance(k, int) or k in named)}
        return {**state_dict, "state": {}}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write the states after the block, in which the optimizer gets its groups. If that fails half way, the state
        is broken until one is loaded."""
        members, whole = self._members, False
        try:
            begin_load(members)
            with deferred_interrupts():
                yield
                for record in members.records:
                    clear_state(record, members)
                    write_state(record, members, self._states.get(record.index, {}))
                members.user_state.touched = {id(members.parameters[index]): True for index in self._states}
                members.user_state.others, members.user_state.unplaced = self._others, {}
                whole = True
        except BaseException as failure:
            if not whole:
                members.store.states.load_failed(f"load_state_dict ended half way: {type(failure).__name__} {failure}")
            raise


def loadable_state(
    state_dict: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    records: Sequence[ParameterRecord],
    family: RuleFamily,
) -> dict[int, dict[str, Any]]:
    """Check a whole ``state_dict`` before anything changes.

    Args:
        state_dict: from ``state_dict()`` of one of our optimizers, or of its twin in torch.
        own: the groups of the optimizer that loads it; ``defaults`` and ``family`` are that optimizer's, too.
        records: records of its parameters, in the order of its groups.

    Returns:
        The state of each parameter that has an entry, which may be empty, by its index, in the order of the entries.

    Raises:
        ValueError: the state does not fit; the message names the parameter or option.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ValueError("this is no optimizer state: it needs 'state' (a dict) and 'param_groups' (a list)")
    groups = state_dict["param_groups"]
    _check_groups(groups, own, defaults, family)
    keys = [key for group in groups for key in group["params"]]
    unknown = sorted(key for key in state_dict["state"] if isinstance(key, int) and key not in set(keys))
    if unknown:
        raise ValueError(f"the state has entries that belong to no parameter: {unknown}")
    loadable = {}
    record_of = dict(zip(keys, records, strict=True))
    for key, entries in state_dict["state"].items():
        if (record := record_of.get(key)) is None:
            continue  # a key of the user's
        if not entries:
            loadable[record.index] = {}
            continue
        family = record.family
        required = {*family.states, *family.scalars} - family.optional_states
        if family.keeps_step and family.needs_step:
            required.add("step")
        loaded = checked_state(record, entries)
        if loaded.get("step") == 0 and not record.parameter.requires_grad and _is_initial(loaded, family):
            continue  # torch's Adagrad keeps the state of frozen parameters too
        loadable[record.index] = {
            key: value if key in family.entries else as_parameter(value, record.parameter)
            for key, value in loaded.items()
        }
        missing = sorted(required - set(entries))
        if missing:
            raise ValueError(
                f"parameter {record.name}: the state lacks {', '.join(missing)}, and has {', '.join(map(str, entries))}"
                "; load it with the class that saved it, or begin anew from the weights"
            )
    return loadable


def _check_groups(
    groups: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    family: RuleFamily,
) -> None:
    theirs_numel = [len(group["params"]) for group in groups]
    own_numel = [len(group["params"]) for group in own]
    if theirs_numel != own_numel:
        unequal = (place for place, (n, m) in enumerate(zip(theirs_numel, own_numel, strict=False)) if n != m)
        first = next(unequal, min(len(groups), len(own)))
        raise ValueError(
            f"the state has groups of {theirs_numel} parameters, and this optimizer of {own_numel}: they differ from "
            f"group {first} on; build the optimizer with the groups of the one that saved the state"
        )
    wrapped = counterparts(_names(groups), {*_names(own)})
    for place, (group, mine) in enumerate(zip(groups, own, strict=True)):
        # Other options have been added to torch's optimizers, and a state without them is an old one.
        options = family.of(mine).options.keys()
        if "ns_steps" in group and family.matrix_state is None:
            raise ValueError(
                f"group {place} of the state has ns_steps: it is Muon's; load it with the class that saved it, or "
                "begin anew from the weights"
            )
        if lacks := sorted({"betas", "momentum", "ns_steps"} & options - group.keys()):
            raise ValueError(
                f"group {place} of the state has no {', '.join(lacks)}: it is another optimizer's (it has "
                f"{', '.join(group)}); load it with the class that saved it, or begin anew from the weights"
            )
        names = zip(group.get("param_names") or [], mine.get("param_names") or [], strict=False)
        for position, (found, expected) in enumerate(names):
            if wrapped[found] != expected:
                raise ValueError(
                    f"the state's parameter {position} of a group is {found!r} and this optimizer's is {expected!r}; "
                    "build the optimizer with its parameters in the same order"
                )
        merged = merged_group(group, mine, defaults, family)
        if family.of(merged) is not family.of(mine):
            raise ValueError(
                f"group {place} of the state has use_muon={merged.get('use_muon', True)}, and this optimizer's has "
                f"use_muon={mine.get('use_muon', True)}; build the optimizer with the groups of the one that saved the "
                "state"
            )
        family.check_group(merged)
    _report_layouts(groups, own, family)


def _report_layouts(groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], family: RuleFamily) -> None:
    """Warn if parameters were divided otherwise in the run that saved its state."""

    def said(group: Mapping[str, Any], name: str) -> Any:
        value = group.get(name, family.absent.get(name))
        return list(value) if isinstance(value, tuple) else value

    for place, (saved, mine) in enumerate(zip(groups, own, strict=True)):
        for name in family.layout_options:
            theirs, here = said(saved, name), said(mine, name)
            if theirs != here:
                warnings.warn(
                    f"group {place} was saved with {name}={theirs!r}, and this optimizer has {name}={here!r}, which "
                    "counts: the run goes on with other steps than the saved one",
                    stacklevel=2,
                )
                return


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group.get("param_names") or []]


def merged_group(
    loaded: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], family: RuleFamily
) -> dict[str, Any]:
    """Return the group after loading: as in the state, except for fixed options and those of how a step is computed.

    As in torch, switches that an older torch did not save are off, whatever the optimizer was built with.
    """
    defaults = {name: value for name, value in defaults.items() if name in own}
    off = dict.fromkeys({"maximize", "nesterov", "decoupled_weight_decay"} & defaults.keys(), False)
    flags = {name: value for name, value in IMPLEMENTATION_FLAGS.items() if name in defaults}
    fixed = {name: own[name] for name in family.initial_states.values()}
    merged = {**defaults, **off, **loaded, **flags, **fixed}
    merged = {name: value for name, value in merged.items() if name in loaded or name not in family.absent}
    laid_out = {name: own[name] for name in family.layout_options if name in own}
    return {name: value for name, value in merged.items() if name not in family.layout_options} | laid_out
