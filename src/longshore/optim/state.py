"""``optimizer.state``, which is looked up at each access because state buffers move, and checks of a ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore.optim.family import IMPLEMENTATION_FLAGS, History, RuleFamily
from longshore.optim.parameters import ParameterRecord, flat
from longshore.optim.shards import like, part_of
from longshore.tiles import MASTER, ParameterStore

if TYPE_CHECKING:
    from longshore.optim.core import OptimizerCore


class ParameterState(MutableMapping[str, Tensor]):
    """One parameter's states as torch names them (Adam: ``step``, ``exp_avg``, ``exp_avg_sq``) and, if the parameter is
    not float32, ``master``.

    Reading gives a copy: float32, on the CPU, of the parameter's shape (``step`` and other single numbers: 0-dim), so
    an in-place change affects only the copy. Setting a key writes to the state buffers.
    """

    def __init__(self, record: ParameterRecord, core: OptimizerCore) -> None:
        self._record = record
        self._core = core

    def _keys(self) -> tuple[str, ...]:
        record, family = self._record, self._core.family
        if not record.has_state:
            return ()
        step = ("step",) if family.keeps_step else ()
        states = (name for name in family.states if name in record.history.states)
        scalars = (name for name, _ in record.history.scalars)
        return (*step, *states, *scalars, *(() if record.dtype == torch.float32 else (MASTER,)))

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys():
            raise KeyError(key)
        record = self._record
        single = {"step": float(record.history.step), **dict(record.history.scalars)}
        if key in single:
            return torch.tensor(single[key], dtype=torch.float32, device="cpu")
        values = self._core.store.read_state(record.index, key).view(record.kept.shape)
        return like(record.parameter, values) if record.keeps_shard else values

    def __setitem__(self, key: str, value: Any) -> None:
        write_state(self._record, self._core, checked_state(self._record, {key: value}, self._core.family))

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"{key!r} is part of the optimizer's state and cannot be deleted; set it instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return repr(dict(self))


class StateMap(MutableMapping[Tensor, Any]):
    """Mapping from the parameters that were stepped or loaded to their state."""

    def __init__(self, core: OptimizerCore) -> None:
        self._core = core

    def _record(self, parameter: Tensor) -> ParameterRecord:
        record = self._core.by_id.get(id(parameter))
        if record is None:
            raise KeyError("not a parameter of this optimizer")
        return record

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        return ParameterState(self._record(parameter), self._core)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        record = self._record(parameter)
        checked = checked_state(record, state, self._core.family)
        clear_state(record, self._core.store)
        write_state(record, self._core, checked)

    def __delitem__(self, parameter: Tensor) -> None:
        clear_state(self._record(parameter), self._core.store)

    def __contains__(self, parameter: object) -> bool:
        record = self._core.by_id.get(id(parameter))
        return record is not None and len(ParameterState(record, self._core)) > 0

    def __iter__(self) -> Iterator[Tensor]:
        return (record.parameter for record in self._core.by_id.values() if record.parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> Any:
        """Return each parameter with its state as a plain dictionary, as ``state_dict()`` packs them."""
        return [(parameter, dict(self[parameter])) for parameter in self]


def checked_state(record: ParameterRecord, state: Mapping[str, Any], family: RuleFamily) -> dict[str, Any]:
    """Check a state that was given for one parameter, and return it as numbers and tensors.

    Raises:
        ValueError: there is an unknown key, a tensor of another shape, or an invalid step count.
    """
    checked: dict[str, Any] = {}
    for key, value in state.items():
        if (key == "step" and family.keeps_step) or key in family.scalars:
            checked[key] = _number(value, record.name, key)
        elif key in family.states or key == MASTER:
            if value is not None or key not in family.optional_states:
                checked[key] = _array(value, record, key)
        elif key in family.refused_states:
            raise ValueError(f"parameter {record.name}: {family.refused_states[key]}")
        else:
            keeps = (*(("step",) if family.keeps_step else ()), *family.states, *family.scalars, MASTER)
            raise ValueError(f"parameter {record.name}: unknown state {key!r}; longshore keeps {', '.join(keeps)}")
    return checked


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
            part = part_of(record.parameter, value) if record.keeps_shard else value
            if part is not None:
                return part
            found += f" placed as {value.placements} on {value.device_mesh}"  # pyright: ignore
    raise ValueError(f"parameter {record.name}: {key} is {found}, not a dense float tensor {list(record.shape)}")


def write_state(record: ParameterRecord, core: OptimizerCore, state: Mapping[str, Any]) -> None:
    """Write some of a parameter's state, as returned by :func:`checked_state`; unset states count as zero."""
    store, family = core.store, core.family
    if not state:
        return
    if record.index not in store:
        core.source.watch([record])
    arrays = state.keys() & {*family.states, MASTER}
    core.have_states(store, arrays)
    for key in arrays:
        store.write_state(record.index, key, flat(state[key].to(device="cpu", dtype=torch.float32)))
    history = record.history
    scalars = {**dict.fromkeys(family.scalars, 0.0), **dict(history.scalars)}
    record.history = History(
        state.get("step", history.step),
        history.states
        | (arrays - {MASTER})
        | (frozenset(store.local.arrays) & {*family.states} - family.optional_states),
        tuple((name, state.get(name, value)) for name, value in scalars.items()),
    )
    record.has_state = True
    if MASTER in state:
        record.has_master = True
        record.published = None  # compare with the parameter before the next step


def clear_state(record: ParameterRecord, store: ParameterStore) -> None:
    """Reset a parameter's state to that before its first step; its master will be read from the parameter again."""
    # Clear it even if no step was completed: a step that failed half way wrote here too.
    store.clear_state(record.index)
    record.history = History()
    record.has_state = record.has_master = False
    record.published = None


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
        The state of each parameter by its index.

    Raises:
        ValueError: the state does not fit; the message names the parameter or option.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ValueError("this is no optimizer state: it needs 'state' (a dict) and 'param_groups' (a list)")
    groups = state_dict["param_groups"]
    theirs_numel = [len(group["params"]) for group in groups]
    own_numel = [len(group["params"]) for group in own]
    if theirs_numel != own_numel:
        raise ValueError(f"the state has groups of {theirs_numel} parameters, and this optimizer of {own_numel}")
    keys = [key for group in groups for key in group["params"]]
    for group, mine in zip(groups, own, strict=True):
        names = zip(group.get("param_names") or [], mine.get("param_names") or [], strict=False)
        for position, (found, expected) in enumerate(names):
            if found != expected:
                raise ValueError(
                    f"the state's parameter {position} of a group is {found!r} and this optimizer's is {expected!r}; "
                    "build the optimizer with its parameters in the same order"
                )
        family.check_group(merged_group(group, mine, defaults, family))
    unknown = sorted(set(state_dict["state"]) - set(keys), key=str)
    if unknown:
        raise ValueError(f"the state has entries that belong to no parameter: {unknown}")
    required = {*family.states, *family.scalars} - family.optional_states
    if family.keeps_step and family.needs_step:
        required.add("step")
    loadable = {}
    for record, key in zip(records, keys, strict=True):
        entries = state_dict["state"].get(key)
        if not entries:
            continue
        loaded = checked_state(record, entries, family)
        if loaded.get("step") == 0 and not record.parameter.requires_grad:
            continue  # torch's Adagrad keeps the state of frozen parameters too
        loadable[record.index] = loaded
        missing = sorted(required - set(entries))
        if missing:
            raise ValueError(f"parameter {record.name}: the state lacks {', '.join(missing)}")
    return loadable


def merged_group(
    loaded: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], family: RuleFamily
) -> dict[str, Any]:
    """Return the group after loading: as in the state, except for fixed options and those of how a step is computed.

    As in torch, switches that an older torch did not save are off, whatever the optimizer was built with.
    """
    off = dict.fromkeys({"maximize", "nesterov", "decoupled_weight_decay"} & defaults.keys(), False)
    flags = {name: value for name, value in IMPLEMENTATION_FLAGS.items() if name in defaults}
    return {**defaults, **off, **loaded, **flags, **{name: own[name] for name in family.initial_states.values()}}
