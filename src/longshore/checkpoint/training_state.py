"""The state of a model and its optimizer: content for a checkpoint, and loading from one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from longshore.checkpoint.boxes import BoxReader, WantedBoxes
from longshore.checkpoint.files import checked, read_json
from longshore.checkpoint.folder import WholeCheckpoint
from longshore.checkpoint.model_state import KIND, ModelState
from longshore.checkpoint.optimizer_state import OptimizerState, checked_about
from longshore.checkpoint.rank_group import RankGroup, reason_of
from longshore.checkpoint.saving import CONFIG, GENERATION_CONFIG, STATE, Content
from longshore.checkpoint.values import Values, decode, read_values
from longshore.errors import CheckpointError
from longshore.optim.host_optimizer import HostOptimizer

MODEL, OPTIMIZER, CLIENT_STATE = "model", "optimizer", "client_state"
"""Keys of the shared values; the caller may have others."""
_SHOWN = 20


class Selection(NamedTuple):
    """What to load. ``strict``: raise if something does not fit; otherwise it is skipped, with a warning."""

    strict: bool = True
    optimizer: bool = True


class _Fit(NamedTuple):
    """A comparison of a checkpoint with this model and optimizer.

    Attributes:
        values: the shared values in the checkpoint.
        sources: tensors of the model to load by name, with their names in the checkpoint.
        among: those of them that the optimizer steps.
        about: the optimizer in the checkpoint; None: it is not loaded.
        differences: what does not fit.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    among: dict[str, str]
    about: dict[str, Any] | None
    differences: list[str]


class TrainingState:
    """A model and its optimizer, as this rank saves and loads them.

    Args:
        model: after its parameters were moved, converted and sharded.
        optimizer: steps them; None: only the model.
        group: the ranks that save and load together.

    Raises:
        CheckpointError: the optimizer steps a parameter that the model does not have.
    """

    def __init__(self, model: nn.Module, optimizer: HostOptimizer | None, group: RankGroup) -> None:
        self._group = group
        self._model = ModelState(model, group.rank, group.world_size)
        self._optimizer = None if optimizer is None else OptimizerState(optimizer, self._model)

    # -- saving ---------------------------------------------------------------

    def content(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        step: int,
        run: str,
        exclude_frozen: bool = False,
        memory_bytes: int | None = None,
    ) -> Content:
        """The content of a checkpoint of the current state.

        Args:
            shared: nested values of the caller, the same on all ranks.
            own: nested values of this rank.
            step: steps of the run.
            run: its name.
            exclude_frozen: leave frozen parameters out.
            memory_bytes: host memory that may be used so that training can continue before the checkpoint is written:
                weights are copied, and the optimizer's state is copied when it is stepped. None: training waits.

        Raises:
            CheckpointError: a value that a checkpoint cannot contain, by its key.
        """
        model = self._model
        left_out = model.frozen() if exclude_frozen else frozenset()
        names = [name for name in model.tensors if name not in left_out]
        about = {
            "aliases": model.aliases,
            "left_out": sorted(left_out),
            "parameters": [name for name in names if isinstance(model.tensors[name], nn.Parameter)],
            "extra_state": model.extra_state(),
        }
        boxes = model.saved(names)
        if memory_bytes is not None:
            boxes = [each.copied() for each in boxes]
        values: dict[str, Any] = {MODEL: about, OPTIMIZER: None, **shared}
        snapshot = None
        if self._optimizer is not None:
            values[OPTIMIZER] = self._optimizer.about()
        written, own_written = Values.of(values), Values.of(own)
        configs = _configs_of(model.model) if self._group.rank == 0 else {}
        if self._optimizer is not None:
            states, snapshot = self._optimizer.saved(memory_bytes)
            boxes += states
        return Content(boxes, written, own_written, configs, step, run, snapshot)

    # -- loading --------------------------------------------------------------

    def load(
        self,
        whole: WholeCheckpoint,
        selection: Selection,
        look: Callable[[Mapping[str, Any]], None] = lambda values: None,
    ) -> dict[str, Any]:
        """Load a checkpoint; all ranks have to call. Returns the values that :meth:`content` was given as shared.

        Args:
            whole: verified.
            selection: what to load.
            look: checks those values before anything changes.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit, with all differences; nothing was loaded.
        """
        reader = BoxReader(whole.path)
        fit = self._group.together(lambda: self._compare(reader, selection, look))
        self._complain(whole, fit.differences, selection.strict)
        boxes, state, about, among = self._model.wanted(fit.sources), self._optimizer, fit.about, fit.among
        if state is not None and about is not None:
            boxes += self._group.together(lambda: state.wanted(about, among))
        self._group.together(lambda: reader.check(boxes))
        try:
            if state is not None and about is not None:
                self._group.together(state.clear)
            self._group.together(lambda: _read(whole, reader, boxes))
            if state is not None and about is not None:
                state.restore_histories(about, among)
                state.restore_groups(about, among)
        except BaseException as failure:
            if state is not None and about is not None:
                state.abandon(failure)
            raise
        self._model.load_extra_state(fit.values[MODEL]["extra_state"])
        return {key: value for key, value in fit.values.items() if key not in (MODEL, OPTIMIZER)}

    def _compare(self, reader: BoxReader, selection: Selection, look: Callable[[Mapping[str, Any]], None]) -> _Fit:
        values = checked_values(read_values(reader.path, STATE), str(reader.path / f"{STATE}.json"))
        sources, differences = self._fit(reader, values[MODEL])
        records = {} if self._optimizer is None else self._optimizer.records
        among = {name: sources[name] for name in records if name in sources}
        about = None
        if selection.optimizer and self._optimizer is not None:
            about = values.get(OPTIMIZER)
            if about is None:
                differences.append(
                    "the checkpoint has no optimizer state (load_optimizer_states=False, or no optimizer: do without)"
                )
            elif found := self._optimizer.differences(about, among):
                differences += found
                about = None
        look(values)
        return _Fit(values, sources, among, about, differences)

    def _fit(self, reader: BoxReader, about: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """The tensors to load by name, with their names in the checkpoint; and what does not fit."""
        saved = reader.of_kind(KIND)
        sources: dict[str, str] = {}
        differences: list[str] = []
        for name, tensor in self._model.tensors.items():
            names = [name, *(alias for alias, first in self._model.aliases.items() if first == name)]
            found = dict.fromkeys(
                source for each in names for source in (each, about["aliases"].get(each)) if source in saved
            )
            if len(found) > 1:
                differences.append(f"{' and '.join(found)} are one tensor here, and several in the checkpoint")
            elif not found and name not in about["left_out"]:
                differences.append(f"{name} is missing in the checkpoint")
            elif not found and tensor.requires_grad:
                differences.append(
                    f"{name} was frozen and left out (exclude_frozen_parameters=True), and is trained here"
                )
            for source in list(found)[:1]:
                shape, dtype = saved[source].shape, saved[source].dtype
                if shape != tuple(tensor.shape):
                    differences.append(f"{name} is {list(shape)} in the checkpoint and {list(tensor.shape)} here")
                    continue
                if dtype != tensor.dtype:
                    differences.append(f"{name} is {dtype} in the checkpoint and {tensor.dtype} here")
                sources[name] = source
        known = {*sources.values(), *self._model.tensors, *self._model.aliases}
        differences += [f"{name} of the checkpoint is not in this model" for name in saved if name not in known]
        return sources, differences

    def _complain(self, whole: WholeCheckpoint, differences: Collection[str], strict: bool) -> None:
        if not differences:
            return
        lines = [f"  {line}" for line in sorted(differences)[:_SHOWN]]
        if len(differences) > _SHOWN:
            lines.append(f"  and {len(differences) - _SHOWN} more")
        said = "\n".join(lines)
        if strict:
            raise CheckpointError(
                f"{whole.path} does not fit; nothing was loaded. strict=False loads what fits. Differences: "
                f"{len(differences)}\n{said}"
            )
        if self._group.rank == 0:
            warnings.warn(f"{whole.path} fits only partly; the rest is skipped, or cast\n{said}", stacklevel=4)


def _read(whole: WholeCheckpoint, reader: BoxReader, boxes: list[WantedBoxes]) -> None:
    try:
        reader.read(boxes)
    except Exception as error:
        whole.check_unchanged()  # a file may be missing because the checkpoint was replaced
        raise CheckpointError(
            f"{whole.path} could be read only partly; load again before training: {reason_of(error)}"
        ) from error
    whole.check_unchanged()


def checked_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the shared values of a checkpoint, from an untrusted file: the model and, unless it is None, the optimizer.

    Raises:
        CheckpointError: they are damaged; ``where`` names them.
    """
    model = checked(values.get(MODEL), dict, f"{where}: {MODEL}")
    for key, kind in (("aliases", dict), ("left_out", list), ("parameters", list), ("extra_state", dict)):
        checked(model.get(key), kind, f"{where}: {key}")
    for name in (*model["aliases"].values(), *model["left_out"], *model["parameters"]):
        checked(name, str, f"{where}: a name")
    if values.get(OPTIMIZER) is not None:
        checked_about(values[OPTIMIZER], f"{where}: {OPTIMIZER}")
    return values


def read_description(path: Path) -> dict[str, Any]:
    """Read and check the shared values of a checkpoint without its tensors, which are replaced by empty ones.

    Raises:
        CheckpointError: they are damaged.
    """
    file = path / f"{STATE}.json"
    empty = torch.empty((), device="meta")
    values = checked(read_json(file), dict, str(file))
    values = {key: decode(value, lambda _: empty, f"{file}: {key}") for key, value in values.items()}
    return checked_values(values, str(file))


def _configs_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of a model that has them as in transformers, by the names of their files."""
    content = _content_of(getattr(model, "config", None), CONFIG)
    if content is None:
        return {}
    if "model_type" in content and not content.get("architectures"):
        name = type(getattr(model, "_orig_mod", model)).__name__
        # fully_shard gives the model a class with this prefix.
        content["architectures"] = [name.removeprefix("FSDP") if hasattr(model, "unshard") else name]
    generation = _content_of(getattr(model, "generation_config", None), GENERATION_CONFIG)
    return {CONFIG: content} if generation is None else {CONFIG: content, GENERATION_CONFIG: generation}


def _content_of(config: Any, file: str) -> dict[str, Any] | None:
    """The content of the file; None, with a warning, if it is not valid JSON: a checkpoint is complete without it."""
    to_json = getattr(config, "to_json_string", None)
    if config is None or isinstance(config, (dict, torch.Tensor)) or not callable(to_json):
        return None
    try:
        text = to_json()
        content = json.loads(text) if isinstance(text, str) else None
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"the checkpoint has no {file}: {type(config).__name__} has values that are not JSON ({error})",
            stacklevel=2,
        )
        return None
    return content if isinstance(content, dict) else None
