"""``optimizer.state``: looked up at each access, because pages move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from longshore.host import EXP_AVG, EXP_AVG_SQ, MASTER, ParameterStore
from longshore.optim.parameters import ParameterRecord, flat

_ARRAYS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ, "master": MASTER}


class ParameterState(MutableMapping[str, Tensor]):
    """One parameter's ``step``, ``exp_avg``, ``exp_avg_sq`` and, in low precision, ``master``.

    Reading gives a copy: float32, on the CPU, of the parameter's shape. Setting
    a key writes to the pages. (A change made in place to a copy changes the copy.)
    """

    def __init__(
        self, record: ParameterRecord, store: ParameterStore, lay_out: Callable[[ParameterRecord], None]
    ) -> None:
        self._record = record
        self._store = store
        self._lay_out = lay_out

    def _keys(self) -> tuple[str, ...]:
        if not self._record.has_moments:
            return ()
        keys = ("step", "exp_avg", "exp_avg_sq")
        return keys if self._record.dtype == torch.float32 else (*keys, "master")

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys():
            raise KeyError(key)
        if key == "step":
            return torch.tensor(float(self._record.step), dtype=torch.float32, device="cpu")
        return self._store.read_state(self._record.index, _ARRAYS[key]).view(self._record.shape)

    def __setitem__(self, key: str, value: Any) -> None:
        write_state(self._record, self._store, self._lay_out, {key: value})

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"{key!r} is part of the optimizer's pages and cannot be deleted; set it instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return repr(dict(self))


class StateMap(MutableMapping[Tensor, Any]):
    """Parameters that have been stepped (or loaded) -> their state."""

    def __init__(
        self, records: Mapping[int, ParameterRecord], store: ParameterStore, lay_out: Callable[[ParameterRecord], None]
    ) -> None:
        self._records = records
        self._store = store
        self._lay_out = lay_out

    def _record(self, parameter: Tensor) -> ParameterRecord:
        record = self._records.get(id(parameter))
        if record is None:
            raise KeyError("not a parameter of this optimizer")
        return record

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        return ParameterState(self._record(parameter), self._store, self._lay_out)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        record = self._record(parameter)
        checked = checked_state(record, state)
        clear_state(record, self._store)
        write_state(record, self._store, self._lay_out, checked)

    def __delitem__(self, parameter: Tensor) -> None:
        clear_state(self._record(parameter), self._store)

    def __contains__(self, parameter: object) -> bool:
        record = self._records.get(id(parameter))
        return record is not None and record.has_moments

    def __iter__(self) -> Iterator[Tensor]:
        return (record.parameter for record in self._records.values() if record.has_moments)

    def __len__(self) -> int:
        return sum(record.has_moments for record in self._records.values())

    def items(self) -> Any:
        """Plain dictionaries, as ``state_dict()`` packs them."""
        return [(parameter, dict(self[parameter])) for parameter in self]


def checked_state(record: ParameterRecord, state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state as read from outside.

    Raises:
        ValueError: an unknown key, another shape, or a step count that is none.
    """
    checked: dict[str, Any] = {}
    for key, value in state.items():
        if key == "step":
            checked[key] = _step_count(value, record.name)
        elif key in _ARRAYS:
            checked[key] = _array(value, record, key)
        elif key == "max_exp_avg_sq":
            raise ValueError(f"parameter {record.name}: the state is that of amsgrad=True, which is not supported")
        else:
            raise ValueError(
                f"parameter {record.name}: unknown state {key!r}; longshore keeps step, {', '.join(_ARRAYS)}"
            )
    return checked


def _step_count(value: Any, name: str) -> int:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    # Beyond 2**53 a double, in which bias corrections are computed, cannot tell two counts apart.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2**53 or value % 1:
        raise ValueError(f"parameter {name}: step is {value!r}, not a count")
    return int(value)


def _array(value: Any, record: ParameterRecord, key: str) -> Tensor:
    found = type(value).__name__
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)} ({value.layout}, {value.device})"
        dense = value.layout == torch.strided and value.device.type != "meta"
        if dense and value.is_floating_point() and value.shape == record.shape:
            return value
    raise ValueError(f"parameter {record.name}: {key} is {found}, not a dense float tensor {list(record.shape)}")


def write_state(
    record: ParameterRecord, store: ParameterStore, lay_out: Callable[[ParameterRecord], None], state: Mapping[str, Any]
) -> None:
    """Write some of a parameter's state; what was never set counts as zero."""
    state = checked_state(record, state)
    if record.index not in store:
        lay_out(record)
    for key, value in state.items():
        if key == "step":
            record.step = value
        else:
            store.write_state(record.index, _ARRAYS[key], flat(value.to(device="cpu", dtype=torch.float32)))
    if state:
        record.has_moments = True
    if "master" in state:
        record.has_master = True
        record.published = None  # compare with the parameter before the next step


def clear_state(record: ParameterRecord, store: ParameterStore) -> None:
    """As if the parameter had never been stepped; its master is read anew from the parameter."""
    # Whether or not a step was completed: one that failed half way wrote here too.
    store.clear_state(record.index)
    record.step = 0
    record.has_moments = record.has_master = False
    record.published = None
