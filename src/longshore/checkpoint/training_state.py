"""The state of a model and its optimizer: content for a checkpoint, and loading from one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from longshore.checkpoint.boxes import tensors_of
from longshore.checkpoint.folder import WholeCheckpoint
from longshore.checkpoint.loading import check_boxes, load_boxes, read_values
from longshore.checkpoint.model_state import KIND, ModelState
from longshore.checkpoint.optimizer_state import OptimizerState, checked_about
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.reading import checked
from longshore.checkpoint.saving import CONFIG, GENERATION_CONFIG, STATE, Content, Values
from longshore.checkpoint.storage import SafetensorsReader
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
    """Tensors to load by name, with their names in the checkpoint; and what does not fit."""

    sources: dict[str, str]
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

        reader = SafetensorsReader(whole.path)

        def compare() -> tuple[dict[str, Any], _Fit, dict[str, Any] | None]:
            found = self._compare(reader, selection)
            look(found[0])
            return found

        values, fit, about = self._group.together(compare)
        self._complain(whole, fit.differences, selection.strict)
        boxes = self._model.wanted(fit.sources)
        among = self._among(fit)
        state = self._optimizer
        if state is not None and about is not None:
            boxes += self._group.together(lambda: state.wanted(about, among))

        check_boxes(reader, boxes, self._group)
        if state is None or about is None:
            load_boxes(reader, boxes, self._group)
            self._group.together(whole.check_unchanged)
        else:
            try:
                self._group.together(state.clear)
                load_boxes(reader, boxes, self._group)
                self._group.together(whole.check_unchanged)
                state.restore_histories(about, among)
                state.restore_groups(about, among)
            except BaseException as failure:
                state.abandon(failure)
                raise
        self._model.load_extra_state(values[MODEL]["extra_state"])
        return {key: value for key, value in values.items() if key not in (MODEL, OPTIMIZER)}

    def _compare(
        self, reader: SafetensorsReader, selection: Selection
    ) -> tuple[dict[str, Any], _Fit, dict[str, Any] | None]:
        where = str(reader.path / STATE)
        values = read_values(reader.path, STATE)
        model = checked(values.get(MODEL), dict, f"{where}: model")
        for key, kind in (("aliases", dict), ("left_out", list), ("extra_state", dict)):
            checked(model.get(key), kind, f"{where}: {key}")
        for name in (*model["aliases"].values(), *model["left_out"]):
            checked(name, str, f"{where}: a name")
        fit = self._fit(reader, model)
        about = None
        if selection.optimizer and self._optimizer is not None:
            if values.get(OPTIMIZER) is None:
                fit.differences.append(
                    "the checkpoint has no optimizer state (load_optimizer_states=False, or no optimizer: do without)"
                )
            else:
                about = checked_about(values[OPTIMIZER], f"{where}: optimizer")
                found = self._optimizer.differences(about, self._among(fit))
                fit.differences.extend(found)
                if found:
                    about = None
        return values, fit, about

    def _among(self, fit: _Fit) -> dict[str, str]:
        """The parameters whose optimizer state is loaded, with their names in the checkpoint."""
        records = {} if self._optimizer is None else self._optimizer.records
        return {name: fit.sources[name] for name in records if name in fit.sources}

    def _fit(self, reader: SafetensorsReader, about: Mapping[str, Any]) -> _Fit:
        saved = {
            name.removeprefix(f"{KIND}."): entry
            for name, entry in tensors_of(reader.read_metadata()).items()
            if name.startswith(f"{KIND}.")
        }
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
                shape, dtype = tuple(saved[source].size), saved[source].properties.dtype
                if shape != tuple(tensor.shape):
                    differences.append(f"{name} is {list(shape)} in the checkpoint and {list(tensor.shape)} here")
                    continue
                if dtype != tensor.dtype:
                    differences.append(f"{name} is {dtype} in the checkpoint and {tensor.dtype} here")
                sources[name] = source
        used = {*sources.values()}
        differences += [
            f"{name} of the checkpoint is not in this model"
            for name in saved
            if name not in used and not self._named(name)
        ]
        return _Fit(sources, differences)

    def _named(self, name: str) -> bool:
        return name in self._model.tensors or name in self._model.aliases

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
