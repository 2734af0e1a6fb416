"""The state of a model and its optimizer: make the content of a checkpoint; find and load a checkpoint.

Ranks may have different parameters, such as the stages of a pipeline: each tensor is written by a rank that has it.
Ranks that have a tensor of the same name have to have the same values, which a checksum compares.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from longshore.checkpoint.boxes import METADATA, BoxReader, WantedBoxes
from longshore.checkpoint.files import checked, checked_entry, checksum, read_json
from longshore.checkpoint.folder import (
    LATEST,
    MANIFEST,
    Candidate,
    WholeCheckpoint,
    candidates,
    check_tag,
    is_checkpoint,
    of_tag,
    read_latest,
)
from longshore.checkpoint.model_state import MODEL, ModelState
from longshore.checkpoint.optimizer_state import OPTIMIZER, OptimizerState, checked_about
from longshore.checkpoint.rank_group import RankGroup, reason_of
from longshore.checkpoint.saving import STATE, Content, configs_of, rank_file, report_arithmetic
from longshore.checkpoint.values import Values, decode, read_values
from longshore.errors import CheckpointError
from longshore.optim.dtensor import counterparts, is_sharded
from longshore.optim.tiled_optimizer import TiledOptimizer

Held = Mapping[str, Any]
"""What has to be the same on all ranks that have a tensor, by what it is."""

CLIENT_STATE = "client_state"
"""Key of the user's values among the shared values. The caller may add other keys."""
_SHOWN = 20


def held_by(model: ModelState, optimizer: OptimizerState | None) -> dict[str, Held]:
    """Return this rank's part of each tensor, by the tensor's name."""
    found: dict[str, Held] = {}
    for name, tensor in model.tensors.items():
        about: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device mesh": None}
        if is_sharded(tensor):
            about["device mesh"] = tensor.device_mesh.mesh.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(tensor, nn.Parameter):  # buffers may differ: one rank writes all of them
            about["values"] = checksum(tensor)
        found[name] = about
    if optimizer is not None:
        for name, about in optimizer.held().items():
            found[name] = {**found[name], **about}
    return found


def tensors_to_write(ranks: Sequence[Mapping[str, Held]], rank: int, buffers: set[str]) -> set[str]:
    """Return the names of the tensors, among those that are not sharded, that a rank writes.

    Raises:
        CheckpointError: ranks have tensors of the same name that differ; it is the same on all ranks.
    """
    holders: dict[str, list[int]] = {}
    for number, held in enumerate(ranks):
        for name in held:
            holders.setdefault(name, []).append(number)
    differing = {}
    for name, (first, *others) in holders.items():
        for other in others:
            one, two = ranks[first][name], ranks[other][name]
            if keys := [key for key in {**one, **two} if one.get(key) != two.get(key)]:
                differing[name] = f"  {name}: ranks {first} and {other} differ in {', '.join(keys)}"
                break
    if differing:
        lines = [*differing.values()][:_SHOWN]
        if len(differing) > _SHOWN:
            lines.append(f"  and {len(differing) - _SHOWN} more")
        raise CheckpointError(
            "ranks have different tensors of the same name, of which a checkpoint can have one. Stages of a pipeline: "
            "give their modules different names, such as those of the whole model, or save each stage into a folder of "
            "its own. Copies of one model: average their gradients (DistributedDataParallel). Differences: "
            f"{len(differing)}\n" + "\n".join(lines)
        )
    # Buffers from one rank: the mean of a rank's batches would not fit the variance of another's.
    return {
        name
        for place, (name, having) in enumerate(sorted(holders.items()))
        if having[0 if name in buffers else place % len(having)] == rank
    }


def merged(abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one description of the models and optimizers of all ranks.

    Raises:
        CheckpointError: the ranks have different kinds of optimizer; it is the same on all ranks.
    """
    models = [about[MODEL] for about in abouts]
    model: dict[str, Any] = {key: {} for key in ("aliases", "extra_state")}
    for each in reversed(models):  # the first rank's count
        for key, entries in model.items():
            entries.update(each[key])
    for key in ("left_out", "parameters"):
        model[key] = [*dict.fromkeys(name for each in models for name in each[key])]
    optimizers = [about[OPTIMIZER] for about in abouts if about[OPTIMIZER] is not None]
    if not optimizers:
        return {MODEL: model, OPTIMIZER: None}
    kinds = sorted({each["kind"] for each in optimizers})
    if len(kinds) > 1:
        raise CheckpointError(
            f"the ranks' optimizers are {' and '.join(kinds)}, and a checkpoint has one kind: save each rank's into a "
            "folder of its own"
        )
    groups, named = [], set()
    for group in (group for each in optimizers for group in each["groups"]):
        names = [name for name in group["parameters"] if name not in named]
        named.update(names)
        if names:
            groups.append({**group, "parameters": names})
    parameters = {name: entry for each in reversed(optimizers) for name, entry in each["parameters"].items()}
    return {MODEL: model, OPTIMIZER: {"kind": kinds[0], "groups": groups, "parameters": parameters}}


def _saved_as(dtype: torch.dtype) -> str:
    return f"is {dtype} in the checkpoint and "


_CASTS = {
    _saved_as(dtype): f"to go on in {dtype}, {how}"
    for dtype, how in {
        torch.bfloat16: "cast the model (model.bfloat16()) before its optimizer is made, or before initialize(); or "
        "set bf16.enabled in the engine's configuration",
        torch.float16: "cast the model (model.half()) before its optimizer is made, or before initialize(); or "
        "set fp16.enabled in the engine's configuration",
        torch.float32: "leave bf16 and fp16 out of the engine's configuration, and the model uncast (model.float())",
    }.items()
}
"""What to do about weights that were saved in another dtype than they have here, by the words that say so."""


def find(root: Path, tag: str | None, group: RankGroup) -> WholeCheckpoint | None:
    """Find and verify the checkpoint to load. All ranks of ``group`` have to call it; each verifies some of the files.

    Without a tag, damaged checkpoints are skipped, with a warning.

    Returns:
        The checkpoint; None if the folder has no checkpoints, and no tag was given.

    Raises:
        CheckpointError: the tag's checkpoint is missing or damaged, or all checkpoints are.
        ValueError: ``tag`` is not a valid tag.
    """
    if tag is not None:
        check_tag(tag)
    found = group.first(lambda: _listed(root, tag))
    skipped: list[str] = []
    if tag is None and group.rank == 0 and found and os.path.lexists(root / LATEST) and read_latest(root) is None:
        warnings.warn(
            f"{root / LATEST} is damaged: it names no tag; the newest complete checkpoint is loaded", stacklevel=4
        )
    for path, problem in found:
        if problem is None:
            try:
                return group.together(lambda path=path: _verified(path, group))
            except CheckpointError as failure:
                problem = failure
        if tag is not None:
            raise problem
        skipped.append(str(problem))
        if group.rank == 0:
            warnings.warn(f"{problem}; the newest complete checkpoint before it is loaded instead", stacklevel=4)
    if skipped:
        raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(skipped)}")
    return None


def _listed(root: Path, tag: str | None) -> list[Candidate]:
    if is_checkpoint(root):
        raise CheckpointError(f"{root} is one checkpoint: give the folder that contains it, and its name as the tag")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file, and checkpoints are in folders")
    found = candidates(root)
    if tag is not None:
        return of_tag(found, root, tag)
    if not found and root.is_dir():
        bare = [path for path in sorted(root.iterdir()) if is_checkpoint(path) and not path.name.startswith(".")]
        return [(path, CheckpointError(f"{path} has no {MANIFEST}: it is damaged")) for path in bare]
    return found


def _verified(path: Path, group: RankGroup) -> WholeCheckpoint:
    whole = WholeCheckpoint(path)
    whole.verify(sorted(whole.files)[group.rank :: group.world_size])
    # All files that will be read have to be in the manifest.
    manifest = str(whole.path / MANIFEST)
    ranks = checked_entry(whole.manifest, "world_size", int, manifest)
    needed = {METADATA, f"{STATE}.json"}
    # A rank that did not exist when the checkpoint was saved reads the first rank's file.
    own = rank_file(group.rank if group.rank < ranks else 0)
    if ranks > 0:
        needed.add(f"{own}.json")
    beside = (f"{STATE}.safetensors", f"{own}.json", f"{own}.safetensors")
    needed |= {name for name in beside if os.path.lexists(whole.path / name)}
    if group.rank == 0:
        needed |= BoxReader(whole.path).files()
    missing = sorted(needed - whole.files.keys())
    if missing:
        raise CheckpointError(f"{manifest} does not list {missing[0]}, which belongs to the checkpoint: it is damaged")
    if ranks > 0:
        read_values(whole.path, own)  # raises before anything has changed
    return whole


class Selection(NamedTuple):
    """The parts to load. ``strict``: raise if something does not fit; otherwise it is skipped, with a warning."""

    strict: bool = True
    optimizer: bool = True


class _Fit(NamedTuple):
    """A comparison of a checkpoint with this model and optimizer.

    Attributes:
        values: the shared values in the checkpoint.
        sources: names in the checkpoint of the tensors to load, by their names in the model.
        among: the part of ``sources`` that the optimizer steps.
        about: the saved optimizer's description; None: the optimizer is not loaded.
        differences: the entries that do not fit.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    among: dict[str, str]
    about: dict[str, Any] | None
    differences: list[str]


class TrainingState:
    """A model and its optimizer, as this rank saves and loads them.

    Args:
        model: the model, after its parameters were moved, converted and sharded.
        optimizer: the optimizer of these parameters; None: only the model is saved and loaded.
        group: the ranks that save and load together.

    Raises:
        CheckpointError: the optimizer steps a parameter that the model does not have.
    """

    def __init__(self, model: nn.Module, optimizer: TiledOptimizer | None, group: RankGroup) -> None:
        self._group = group
        self._model = ModelState(model, group.rank, group.world_size)
        self._optimizer = None if optimizer is None else OptimizerState(optimizer, self._model)
        self._of_all_ranks: Mapping[str, Any] | None = None
        """The description of what all ranks have; None: they have the same parameters."""

    # -- saving ---------------------------------------------------------------

    def compare_ranks(self) -> None:
        """Let each rank write its own part, which may be a stage of a pipeline; all ranks have to call it.

        Without this call all ranks have the same parameters and buffers.

        Raises:
            CheckpointError: ranks have tensors of the same name that differ, or different kinds of optimizer.
        """
        model = self._model
        ranks = self._group.gather_differing(self._group.together(lambda: held_by(model, self._optimizer)))
        buffers = {name for name, tensor in model.tensors.items() if not isinstance(tensor, nn.Parameter)}
        model.to_write = tensors_to_write(ranks, self._group.rank, buffers)
        if any(held.keys() != ranks[0].keys() for held in ranks):
            self._of_all_ranks = merged(self._group.gather(self._group.together(lambda: self._about(set()))))

    def _about(self, left_out: Set[str]) -> dict[str, Any]:
        model = self._model
        parameters = [name for name, tensor in model.tensors.items() if isinstance(tensor, nn.Parameter)]
        about = {
            "aliases": model.aliases,
            "left_out": sorted(left_out),
            "parameters": [name for name in parameters if name not in left_out],
            "extra_state": model.extra_state(),
        }
        return {MODEL: about, OPTIMIZER: None if self._optimizer is None else self._optimizer.about()}

    def content(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        step: int,
        run: str,
        exclude_frozen: bool = False,
        memory_bytes: int | None = None,
    ) -> Content:
        """Return the content of a checkpoint of the current state.

        Args:
            shared: nested values of the caller, which are the same on all ranks.
            own: nested values of this rank.
            step: the number of steps of the run.
            run: the name of the run.
            exclude_frozen: leave frozen parameters out.
            memory_bytes: host memory that may be used so that training can continue before the checkpoint is written:
                weights are copied, and the optimizer's state is copied when it is stepped. None: training waits.

        Raises:
            CheckpointError: a checkpoint cannot contain a value; the message has its key.
        """
        model = self._model
        left_out = {
            name
            for name, tensor in model.tensors.items()
            if exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        }
        names = [name for name in model.tensors if name not in left_out]
        boxes = model.saved(names)
        if memory_bytes is not None:
            boxes = [each.copied() for each in boxes]
        state, snapshot = self._optimizer, None
        values = {**(self._of_all_ranks or self._about(left_out)), **shared}
        written, own_written = Values.of(values), Values.of(own)
        configs = configs_of(model.model) if self._group.rank == 0 else {}
        if state is not None:
            states, snapshot = state.saved(memory_bytes)
            boxes += states
        return Content(boxes, written, own_written, configs, step, run, snapshot)

    # -- loading --------------------------------------------------------------

    def load(
        self,
        whole: WholeCheckpoint,
        selection: Selection,
        look: Callable[[Mapping[str, Any]], None] = lambda values: None,
    ) -> dict[str, Any]:
        """Load a checkpoint, and return the shared values given to :meth:`content`; all ranks have to call it.

        Args:
            whole: the checkpoint, verified.
            selection: the parts to load.
            look: checks the shared values before anything changes.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit, with all differences; nothing was loaded.
        """
        reader = BoxReader(whole.path)
        here = {*self._model.tensors, *self._model.aliases}
        names = here.union(*self._group.gather_differing(sorted(here)))  # other ranks may have other stages
        fit = self._group.together(lambda: self._compare(reader, selection, look, names))
        found = {each for theirs in self._group.gather(fit.differences) for each in theirs}
        self._report(whole, found | self._not_stepped(fit), selection.strict)
        boxes = [self._model.wanted(name, source) for name, source in fit.sources.items()]
        about, state = fit.about or {}, None if fit.about is None else self._optimizer
        boxes += self._group.together(lambda: [] if state is None else state.wanted(about, fit.among))
        self._group.together(lambda: reader.check(boxes))
        try:
            self._group.together(lambda: None if state is None else state.clear())
            self._group.together(lambda: _read(whole, reader, boxes))
            if state is not None:
                state.restore_histories(about, fit.among)
                state.restore_groups(about, fit.among)
                if self._group.rank == 0:
                    state.report_conversion(about, fit.among)
                    report_arithmetic(whole)
        except BaseException as failure:
            if state is not None:
                state.abandon(failure)
            raise
        self._model.load_extra_state(fit.values[MODEL]["extra_state"])
        return {key: value for key, value in fit.values.items() if key not in (MODEL, OPTIMIZER)}

    def _compare(
        self,
        reader: BoxReader,
        selection: Selection,
        look: Callable[[Mapping[str, Any]], None],
        names: Set[str],
    ) -> _Fit:
        values = checked_values(read_values(reader.path, STATE), str(reader.path / f"{STATE}.json"))
        sources, differences = self._fit(reader, values[MODEL], names)
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

    def _fit(self, reader: BoxReader, about: Mapping[str, Any], names: Set[str]) -> tuple[dict[str, str], list[str]]:
        """Return the tensors to load by name, with their names in the checkpoint; and the differences.

        ``names`` are those of the tensors of all ranks.
        """
        saved = reader.of_kind(MODEL)
        there = counterparts(names, {*saved, *about["aliases"], *about["left_out"]})
        sources: dict[str, str] = {}
        differences: list[str] = []
        for name, tensor in self._model.tensors.items():
            tied = [there[each] for each in (name, *self._model.aliases) if self._model.aliases.get(each, name) == name]
            found = dict.fromkeys(
                source for each in tied for source in (each, about["aliases"].get(each)) if source in saved
            )
            if len(found) > 1:
                differences.append(f"{' and '.join(found)} are one tensor here, and several in the checkpoint")
            elif not found and there[name] not in about["left_out"]:
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
                    differences.append(f"{name} {_saved_as(dtype)}{tensor.dtype} here")
                sources[name] = source
        known = {*sources.values(), *there.values(), *(about["aliases"].get(each) for each in there.values())}
        differences += [f"{name} of the checkpoint is not in this model" for name in saved if name not in known]
        return sources, differences

    def _not_stepped(self, fit: _Fit) -> set[str]:
        """Describe the saved states of parameters that are loaded and that the optimizers of all ranks leave alone."""
        mine = sorted(fit.sources.values()), sorted(fit.among.values())
        here, stepped = (set().union(*each) for each in zip(*self._group.gather_differing(mine), strict=True))
        saved = {} if fit.about is None else fit.about["parameters"]
        left = sorted((saved.keys() & here) - stepped)
        if not left:
            return set()
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        return {
            f"the checkpoint has the optimizer's state of {', '.join(left[:5])}{more}, and no parameter group here has "
            "them: their state would be lost"
        }

    def _report(self, whole: WholeCheckpoint, differences: Collection[str], strict: bool) -> None:
        if not differences:
            return
        lines = [f"  {line}" for line in sorted(differences)[:_SHOWN]]
        if len(differences) > _SHOWN:
            lines.append(f"  and {len(differences) - _SHOWN} more")
        lines += [f"  {how}" for found, how in _CASTS.items() if any(found in line for line in differences)]
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
    model = checked_entry(values, MODEL, dict, where)
    for key, kind in (("aliases", dict), ("left_out", list), ("parameters", list), ("extra_state", dict)):
        checked_entry(model, key, kind, where)
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
