"""An optimizer's state in a checkpoint: arrays as tensors by the parameter's name, everything else in JSON.

States that are not float32 are in the files as bfloat16, which holds the numbers of every such format exactly, so that
the same codes are made of them when they are loaded. The format of each parameter's states is among the description's
values; an optimizer with another format converts them, each number to the nearest one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longshore.checkpoint.boxes import SavedBoxes, WantedBoxes
from longshore.checkpoint.files import checked, checked_entry, checksum
from longshore.checkpoint.model_state import ModelState, box_of_shard
from longshore.errors import CheckpointError
from longshore.layout.boxes import Box, boxes_in
from longshore.layout.formats import StateFormat
from longshore.optim.family import History, TorchFamily
from longshore.optim.parameters import ParameterRecord
from longshore.optim.state import as_parameter, begin_load, clear_state, merged_group
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.tiles import MASTER, StateSnapshot

FORMAT = "format"
"""Entry of a parameter whose states are not float32."""
STATES_SEED = "states_seed"
"""Entry of an optimizer that has such states."""

OPTIMIZER = "optimizer"
"""First part of the names of the optimizer's arrays in a checkpoint, and its key among the shared values."""

_MATRICES_ON = "matrices_on"


def format_entry(record: ParameterRecord) -> dict[str, str]:
    """Return the entries of a checkpoint for the format of a parameter's states; none if it is float32."""
    format = record.coding.format
    return {} if format is StateFormat.FP32 else {FORMAT: format.value}


def check_format(entry: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the format, from an untrusted file, is not one that we know."""
    if entry.get(FORMAT, StateFormat.FP32.value) not in [each.value for each in StateFormat]:
        raise CheckpointError(
            f"{where} has states in the format {entry[FORMAT]!r}, which this version of longshore does not know"
        )


def dtype_in_files(record: ParameterRecord, array: str) -> torch.dtype:
    """Return the dtype that one array of a parameter has in files."""
    encoded = array != MASTER and record.coding.format is not StateFormat.FP32
    return torch.bfloat16 if encoded else torch.float32


def read_as(dtype: torch.dtype, read: Callable[[int, str], Tensor], key: int, array: str) -> Tensor:
    """Return an array of the store in the dtype of :func:`dtype_in_files`."""
    return read(key, array).to(dtype)


def report_conversion(
    about: Mapping[str, Any], among: Mapping[str, str], records: Mapping[str, ParameterRecord], seed: int | None
) -> None:
    """Warn if loaded states were converted from another format, or will be rounded with other random bits.

    Args:
        about: the saved optimizer.
        among: the loaded parameters, by name, with their names in the checkpoint.
        records: this optimizer's parameters.
        seed: its ``states_seed``; None: its states are float32.
    """
    pairs = ((records[name], about["parameters"].get(source)) for name, source in among.items())
    formats = {
        (entry.get(FORMAT, StateFormat.FP32.value), record.coding.format.value)
        for record, entry in pairs
        if entry is not None and {*entry["arrays"]} - {MASTER}
    }
    if changed := [f"{theirs} to {own}" for theirs, own in sorted(formats) if theirs != own]:
        warnings.warn(
            f"the checkpoint's states were converted from {', '.join(changed)}, the format of this optimizer "
            "(states=...), each number to the nearest one",
            stacklevel=2,
        )
    theirs = about.get(STATES_SEED)
    if theirs is not None and seed not in (None, theirs):
        warnings.warn(
            f"the checkpoint is of a run with states_seed={theirs}, and here it is {seed}: the run goes on with other "
            "random bits than there",
            stacklevel=2,
        )


def array_name(state: str, parameter: str) -> str:
    return f"{OPTIMIZER}.{state}.{parameter}"


class OptimizerState:
    """Saves and restores an optimizer.

    Args:
        optimizer: the optimizer of this process.
        model: the model whose parameters it steps.

    Raises:
        CheckpointError: the optimizer steps a parameter that the model does not have.
    """

    def __init__(self, optimizer: TiledOptimizer, model: ModelState) -> None:
        self.optimizer = optimizer
        self._model = model
        members = self._members = core_of(optimizer).members
        self._store = members.store
        self._family = members.family
        self.records: dict[str, ParameterRecord] = {}
        present = members.indices()
        for record in members.records:
            if record.index not in present:
                continue  # as in a state_dict()
            name = model.name_of(record.parameter)
            if name is None:
                raise CheckpointError(
                    f"the optimizer steps {record.name}, {list(record.shape)}, which is not a parameter of the saved "
                    "model; save a module that has both as submodules"
                )
            self.records[name] = record

    @property
    def kind(self) -> str:
        """The name of the optimizer in a checkpoint."""
        return f"torch.{self._family.kind}" if isinstance(self._family, TorchFamily) else type(self.optimizer).__name__

    # -- saving ---------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return everything but the arrays, as nested values."""
        user_state = self._members.user_state
        user_state.write_back(self._members)
        groups = [
            {
                "options": {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")},
                "parameters": self._names(group),
            }
            for group in self.optimizer.param_groups
        ]
        parameters = {
            name: {
                "step": record.history.step,
                "scalars": dict(record.history.scalars),
                "arrays": _arrays_of(record),
                "published": not record.changed,
                **format_entry(record),
                "entries": dict(user_state.entries.get(id(record.parameter), {})),
            }
            for name, record in self.records.items()
            if record.has_state or _arrays_of(record) or id(record.parameter) in user_state.entries
        }
        about = {"kind": self.kind, "groups": groups, "parameters": parameters, "others": dict(user_state.others)}
        if self._states_seed is not None:
            about[STATES_SEED] = self._states_seed
        return {**about, _MATRICES_ON: device} if (device := self._matrices_on()) else about

    @property
    def _states_seed(self) -> int | None:
        """The number on which the random bits of encoded states depend; None: states are float32."""
        offload = self._members.offload
        return None if offload.state_format is StateFormat.FP32 else offload.states_seed

    def _matrices_on(self) -> str | None:
        """Return the type of device on which whole matrices are transformed, to which the bits of their products
        belong; None if there are none."""
        if not any(record.matrices for record in self.records.values()):
            return None
        return self._store.tiles.streams.device.type

    def held(self) -> dict[str, dict[str, Any]]:
        """Return the values that ranks with the same parameter have to share, by name. States are checksums."""
        store, about = self._store, self.about()
        options = _options_by_name(about)
        found = {}
        for name, record in self.records.items():
            entry = {key: about["parameters"].get(name, {}).get(key) for key in ("step", "scalars", "arrays", FORMAT)}
            known = {key: repr(options[name].get(key)) for key in self.optimizer.defaults}
            found[name] = {**entry, **known}
            if store.alone and not record.keeps_shard:
                found[name] |= {
                    array: checksum(store.states.read(record.index, array)) for array in entry["arrays"] or ()
                }
        return found

    def saved(self, memory_bytes: int | None = None) -> tuple[list[SavedBoxes], StateSnapshot | None]:
        """Return the boxes that this process writes and, with ``memory_bytes``, the snapshot from which they are read.

        Raises:
            BrokenStateError: a step, or the loading of a checkpoint, was interrupted.
        """
        store = self._store
        store.states.check_usable()
        ranges = [
            (record, array, name, key, boxes)
            for name, record in self.records.items()
            for array in _arrays_of(record)
            for key, boxes, writes in self._ranges(record, name)
            if writes and boxes
        ]
        keys = [(key, array) for _, array, _, key, _ in ranges]
        snapshot = None if memory_bytes is None else store.states.ranges.snapshot(keys, memory_bytes)
        read = store.states.ranges.read if snapshot is None else snapshot.read_range
        found = [
            SavedBoxes(
                array_name(array, name),
                (dtype := dtype_in_files(record, array)),
                tuple(record.shape),
                boxes,
                functools.partial(read_as, dtype, read, key, array),
            )
            for record, array, name, key, boxes in ranges
        ]
        return found, snapshot

    def _ranges(self, record: ParameterRecord, name: str) -> list[tuple[int, list[Box], bool]]:
        """Return the ranges whose state this process has: store key, boxes of the parameter, whether it writes them."""
        shape = tuple(record.shape)
        if record.keeps_shard:
            box, first = box_of_shard(record.parameter, name)
            return [(record.index, [box], first)] if box.numel > 0 else []
        # Ranks of an engine divide the state; all other ranks have the whole state of the same parameters.
        alone = self._model.to_write if self._store.alone else None
        here = alone is None or name in alone
        return [
            (owned.key, boxes_in(shape, owned.within, owned.offset, owned.numel), owned.saves and here)
            for owned in self._store.ownership.owned(record.index)
        ]

    # -- loading --------------------------------------------------------------

    def differences(self, about: Mapping[str, Any], among: Mapping[str, str]) -> list[str]:
        """Describe the differences from a saved optimizer that prevent loading it.

        Args:
            about: the saved optimizer, as :func:`checked_about` returns it.
            among: the parameters to load, by name, with their names in the checkpoint.
        """
        if about["kind"] != self.kind and not self._is_adamw(about):
            return [f"the checkpoint was saved from {about['kind']}, and this optimizer is {self.kind}"]
        known = {*self._family.states, MASTER}
        found = [
            f"{name} has the state {array}, which {self.kind} does not have"
            for name, entry in about["parameters"].items()
            for array in entry["arrays"]
            if array not in known
        ]
        options = _options_by_name(about)
        for number, group in enumerate(self.optimizer.param_groups):
            names = [among[name] for name in self._names(group) if name in among]
            lost = [name for name in names if name not in options]
            if lost:
                more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
                found.append(f"no parameter group of the checkpoint has {', '.join(sorted(lost)[:5])}{more}")
            kinds = {repr(options[name]): name for name in names if name in options}
            for name in kinds.values():
                try:
                    merged = self._merged(options[name], group)
                    if self._family.of(merged) is not self._family.of(group):
                        found.append(f"{name} was stepped by another rule (use_muon) when the checkpoint was saved")
                        continue
                    self._family.check_group(merged)
                except (ValueError, TypeError, KeyError) as error:
                    found.append(f"the options of {name} in the checkpoint are not valid for {self.kind}: {error}")
            if len(kinds) > 1:
                found.append(
                    f"parameter group {number} of this optimizer has {' and '.join(list(kinds.values())[:2])}, whose "
                    "options differ from each other in the checkpoint"
                )
        return found

    def _is_adamw(self, about: Mapping[str, Any]) -> bool:
        """Return whether both are AdamW, which one of them calls Adam with a decoupled weight decay in every group."""
        options = [*(group["options"] for group in about["groups"]), *self.optimizer.param_groups]
        decoupled = all(each.get("decoupled_weight_decay") is True for each in options)
        return decoupled and {about["kind"], self.kind} == {"Adam", "AdamW"}

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        names = {id(record.parameter): name for name, record in self.records.items()}
        return [names[id(parameter)] for parameter in group["params"]]

    def restore_groups(self, about: Mapping[str, Any], among: Mapping[str, str]) -> None:
        """Give every parameter group the options that its parameters had."""
        options = _options_by_name(about)
        for group in self.optimizer.param_groups:
            theirs = next((options[among[name]] for name in self._names(group) if name in among), None)
            if theirs is not None:
                # Updated in place, since schedulers may have a reference to the group.
                group.update({**self._merged(theirs, group), "params": group["params"]})

    def _merged(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        return merged_group(theirs, group, self.optimizer.defaults, self._family)

    def clear(self) -> None:
        """Reset the state, as if nothing had been stepped."""
        members = self._members
        begin_load(members)
        for record in members.records:
            clear_state(record, members)
        members.user_state.unplaced = {}

    def abandon(self, failure: BaseException) -> None:
        """Mark the state as broken after a failed load: the optimizer does not step until a load succeeds."""
        self._store.states.load_failed(f"{type(failure).__name__}: {failure}")

    def wanted(self, about: Mapping[str, Any], among: Mapping[str, str]) -> list[WantedBoxes]:
        """Allocate the state, and return the boxes that this process loads; arguments as in :meth:`differences`."""
        members = self._members
        entries = {name: about["parameters"][source] for name, source in among.items() if source in about["parameters"]}
        members.have_states(self._store, {array for entry in entries.values() for array in entry["arrays"]})
        found: list[WantedBoxes] = []
        for name, entry in entries.items():
            record = self.records[name]
            if record.index not in self._store.ownership:
                members.source.watch([record])
            for array in entry["arrays"]:
                where = array_name(array, among[name])
                for key, boxes, _ in self._ranges(record, where):
                    if boxes:
                        take = functools.partial(self._store.states.ranges.write, key, array)
                        found.append(WantedBoxes(where, tuple(record.shape), boxes, take))
        return found

    def report_conversion(self, about: Mapping[str, Any], among: Mapping[str, str]) -> None:
        """Warn if loaded states were converted, or will be rounded with other random bits; for one rank."""
        report_conversion(about, among, self.records, self._states_seed)

    def restore_histories(self, about: Mapping[str, Any], among: Mapping[str, str]) -> None:
        """Restore everything but the arrays, once these are loaded."""
        user_state = self._members.user_state
        user_state.others = dict(about.get("others", {}))
        if (device := about.get(_MATRICES_ON)) and (own := self._matrices_on()) and device != own:
            warnings.warn(
                f"the checkpoint is of a run whose matrices were made orthogonal on {device}, and here it is on {own}: "
                "the run goes on, with other last bits than there, since products of matrices have others",
                stacklevel=2,
            )
        for name, source in among.items():
            entry = about["parameters"].get(source)
            if entry is None:
                continue
            record = self.records[name]
            user_state.keep(record, as_parameter(entry.get("entries", {}), record.parameter))
            arrays = frozenset(entry["arrays"])
            scalars = tuple((key, entry["scalars"].get(key, 0.0)) for key in record.family.scalars)
            record.history = History(entry["step"], arrays - {MASTER}, scalars)
            # A loaded state of a rule that counts no steps may be the master alone.
            record.has_state = entry["step"] > 0 or bool(arrays - {MASTER} if record.family.keeps_step else arrays)
            record.has_master = MASTER in arrays
            record.published = None  # so that the parameter is compared before the next step
            if record.has_master and entry.get("published") is True:
                record.mark_published()  # the parameter equals its rounded master


def checked_about(content: Any, where: str) -> dict[str, Any]:
    """Check the content of :meth:`OptimizerState.about`, from an untrusted file.

    Raises:
        CheckpointError: the content is damaged; the message says where.
    """
    checked_entry(content, "kind", str, where)
    for group in checked_entry(content, "groups", list, where):
        checked_entry(group, "options", dict, f"{where}: a group")
        for name in checked_entry(group, "parameters", list, f"{where}: a group"):
            checked(name, str, f"{where}: a parameter of a group")
    if _MATRICES_ON in content:
        checked_entry(content, _MATRICES_ON, str, where)
    if STATES_SEED in content:
        checked_entry(content, STATES_SEED, int, where)
    if "others" in content:
        checked_entry(content, "others", dict, where)
    for name, about in checked_entry(content, "parameters", dict, where).items():
        at = f"{where}: {name}"
        if "entries" in checked(about, dict, at):
            checked_entry(about, "entries", dict, at)
        check_format(about, at)
        if (step := checked_entry(about, "step", int, at)) > 2**53:
            raise CheckpointError(f"{at} has made {step} steps, more than can be counted")
        for key, value in checked_entry(about, "scalars", dict, at).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise CheckpointError(f"{at}: {key} is not a number")
        for array in checked_entry(about, "arrays", list, at):
            checked(array, str, f"{at}: an array")
    return content


def _arrays_of(record: ParameterRecord) -> list[str]:
    states = sorted(record.history.states) if record.has_state else []
    return [*states, *([MASTER] if record.has_master and record.dtype != torch.float32 else [])]


def _options_by_name(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: group["options"] for group in about["groups"] for name in group["parameters"]}


def _plain(option: Any) -> Any:
    """Return an option with sequences of other libraries as Python's; a checkpoint knows the numbers of NumPy."""
    if isinstance(option, np.ndarray):
        return option.tolist()
    if isinstance(option, Sequence) and not isinstance(option, str):
        parts = [_plain(part) for part in option]
        return tuple(parts) if isinstance(option, tuple) else parts
    return option
