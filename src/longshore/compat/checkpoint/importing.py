"""Import of a checkpoint that DeepSpeed's ``engine.save_checkpoint`` wrote.

DeepSpeed need not be installed, and no code that the files name is run. Each tensor is read only when it is written to
the new checkpoint, one parameter at a time.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshore import CheckpointError
from longshore.compat.checkpoint.files import Inert, SavedFiles, Shard, read_files
from longshore.compat.checkpoint.layout import (
    SavedGroup,
    SavedParameter,
    ShardedTensor,
    plain,
    range_of,
    read_optimizer,
    shapes_of,
)
from longshore.seam import (
    CLIENT_STATE,
    MASTER,
    MODEL,
    OPTIMIZER,
    Box,
    Content,
    RankGroup,
    SavedBoxes,
    Target,
    Values,
    array_name,
    checked,
    checked_entry,
    encode,
    write,
)

_THEIRS = frozenset(
    {
        *("module", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "ds_config", "ds_version"),
        *("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "ds_autoep_layers"),
        *("csr_tensor_module_names", "sparse_tensor_module_names"),
    }
)
"""Keys of a model's file; all others are the user's client state."""
_ARRAYS = ["exp_avg", "exp_avg_sq"]
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "maximize", "initial_lr")
_EXTRA = "_extra_state"


def import_deepspeed(source: Path, out: Path, tag: str | None = None) -> Path:
    """Convert DeepSpeed's checkpoint into one that ``engine.load_checkpoint(out)`` reads at any stage.

    The result has weights, masters, Adam's moments and step counts, the options of parameter groups, the scheduler, the
    loss scale, the counters and the client state. Values that longshore's format does not have are left out, with a
    warning that names the key. DeepSpeed saves neither random states nor the position in the data, so both start again.

    Args:
        source: the folder that was given to DeepSpeed's ``save_checkpoint``, from ZeRO stage 1, 2 or 3.
        out: the folder for the checkpoint, which has the same tag.
        tag: the checkpoint's tag; None: the tag that ``latest`` names.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: files are damaged, missing, of another format, or need code to be run; or ``out`` has that tag
            already. Nothing was written.
        ValueError: ``tag`` is not a valid tag.
    """
    files = read_files(Path(source), tag)
    target = Target(Path(out).absolute(), files.folder.name)
    if os.path.lexists(target.root / target.tag):
        raise CheckpointError(f"{target.root / target.tag} exists already: choose another folder, or move it away")
    groups, parameters = read_optimizer(files)
    model, boxes, dtypes = _read_model(files, parameters)
    first = files.models[0]
    # A float32 parameter is its own master.
    arrays = {
        name: stepped.arrays if dtypes[name] == torch.float32 else {**stepped.arrays, MASTER: stepped.master}
        for name, stepped in parameters.items()
    }
    boxes += [
        tensor.saved(array_name(array, name), torch.float32)
        for name, tensors in arrays.items()
        for array, tensor in tensors.items()
    ]
    engine = _engine_state(files)
    shared = {
        MODEL: model,
        OPTIMIZER: _about(groups, parameters, arrays, first),
        "engine": engine,
        CLIENT_STATE: {
            key: value
            for key, value in first.content.items()
            if key not in _THEIRS and _fits(value, f"{first.path}: {key}")
        },
    }
    own = Values.of({"random": None, "loader": None})
    return write(Content(boxes, Values.of(shared), own, {}, engine["global_steps"], engine["run"]), target, RankGroup())


# -- the model ----------------------------------------------------------------


def _read_model(
    files: SavedFiles, stepped: Mapping[str, SavedParameter]
) -> tuple[dict[str, Any], list[SavedBoxes], dict[str, torch.dtype]]:
    """Return the model's entry in a checkpoint's shared values, its boxes, and the dtype of each of its tensors."""
    first = files.models[0]
    module = checked_entry(first.content, "module", dict, str(first.path))
    buffers = set(checked(first.content.get("buffer_names") or [], list, f"{first.path}: buffer_names"))
    frozen = shapes_of(first.content.get("frozen_param_shapes") or {}, f"{first.path}: frozen_param_shapes")
    aliases = _aliases(first, module, {*stepped, *frozen})
    gathered = {name: parameter.master for name, parameter in stepped.items()}
    gathered |= _fragments(files, frozen)
    split = len(files.models) > 1 or first.path.name.startswith("zero_")
    about: dict[str, Any] = {"aliases": aliases, "left_out": [], "parameters": [], "extra_state": {}}
    boxes, dtypes = [], {}
    for name, value in module.items():
        if name.rpartition(".")[2] == _EXTRA:
            if _fits(value, f"{first.path}: {name}"):
                about["extra_state"][name.removesuffix(_EXTRA).rstrip(".")] = value
            continue
        if name in aliases:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{first.path}: {name} is not a tensor")
        if split and name not in buffers:
            if name not in gathered:
                warnings.warn(f"{first.path} has no values of {name}, and it is left out", stacklevel=3)
                continue
            boxes.append(gathered[name].saved(f"{MODEL}.{name}", value.dtype))
        else:
            whole = Box.whole(tuple(value.shape))
            read = functools.partial(torch.Tensor.detach, value)
            boxes.append(SavedBoxes(f"{MODEL}.{name}", value.dtype, whole.sizes, [whole], read))
        if name not in buffers:
            about["parameters"].append(name)
        dtypes[name] = value.dtype
    for name, parameter in stepped.items():
        if name not in dtypes or (not split and tuple(module[name].shape) != parameter.master.shape):
            raise CheckpointError(f"{first.path}: {name} is stepped, and the model has no such parameter of that shape")
    return about, boxes, dtypes


def _aliases(first: Shard, module: Mapping[str, Any], own: set[str]) -> dict[str, str]:
    """Return the further names of tied tensors: those that DeepSpeed lists, and those of tensors that share memory."""
    found: dict[str, str] = {}
    for name, source in checked(first.content.get("shared_params") or {}, dict, f"{first.path}: shared_params").items():
        if name in module and source in module and name != source:
            found[name] = source
    memory: dict[Any, str] = {}
    for name, value in module.items():
        if isinstance(value, Tensor) and value.numel() > 0 and name not in found:
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            source = memory.setdefault(place, name)
            if source != name and name not in own:
                found[name] = source
    return found


def _fragments(files: SavedFiles, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ShardedTensor]:
    """Return the frozen parameters, which are sharded over the ranks at stage 3."""
    key = "frozen_param_fragments"
    ranks = [checked(shard.content.get(key) or {}, dict, f"{shard.path}: {key}") for shard in files.models]
    found = {}
    for name, shape in shapes.items():
        shards = [rank.get(name) for rank in ranks]
        if not all(isinstance(shard, Tensor) for shard in shards):
            raise CheckpointError(f"{files.folder}: a rank's file lacks its shard of the frozen {name}")
        numel = math.prod(shape)
        flat = range_of([shard.reshape(-1) for shard in shards if shard is not None], 0, numel)
        if sum(shard.numel() for shard in flat) != numel:
            raise CheckpointError(f"{files.folder}: the shards of the frozen {name} are not {list(shape)} together")
        found[name] = ShardedTensor(shape, flat)
    return found


# -- the optimizer ------------------------------------------------------------


def _about(
    groups: Sequence[SavedGroup],
    parameters: Mapping[str, SavedParameter],
    arrays: Mapping[str, Iterable[str]],
    first: Shard,
) -> dict[str, Any]:
    """Describe the optimizer in the form of :meth:`longshore.checkpoint.optimizer_state.OptimizerState.about`."""
    for name, stepped in parameters.items():
        if sorted(stepped.arrays) != _ARRAYS and (stepped.arrays or stepped.step > 0):
            raise CheckpointError(
                f"{first.path}: {name} has the states {', '.join(sorted(stepped.arrays)) or 'of no kind'}, and those "
                f"of Adam and AdamW are imported: {', '.join(_ARRAYS)}"
            )
    kind = _kind(groups, first)
    found = []
    for group in groups:
        options = {key: plain(group.options[key]) for key in _OPTIONS if key in group.options}
        if group.options.get("amsgrad"):
            raise CheckpointError(f"{first.path}: amsgrad=True, and longshore has no maximum of second moments")
        found.append({"options": {**options, "decoupled_weight_decay": kind == "AdamW"}, "parameters": group.names})
    entries = {
        name: {"step": stepped.step, "scalars": {}, "arrays": [*arrays[name]]} for name, stepped in parameters.items()
    }
    return {"kind": kind, "groups": found, "parameters": entries}


def _kind(groups: Sequence[SavedGroup], first: Shard) -> str:
    """Return "AdamW" or "Adam": DeepSpeed's ``Adam`` means AdamW unless its options say otherwise."""
    section = _config(first).get("optimizer")
    named = section.get("type") if isinstance(section, dict) else None
    if isinstance(section, dict) and isinstance(named, str):
        params = section.get("params")
        if named.lower() not in ("adam", "adamw"):
            raise CheckpointError(f"{first.path} is of the optimizer {named}, and Adam and AdamW are imported")
        plain = isinstance(params, dict) and params.get("adam_w_mode") is False and named.lower() == "adam"
        return "Adam" if plain else "AdamW"
    flags = {group.options.get("decoupled_weight_decay") for group in groups}
    if flags <= {True, False} and len(flags) == 1:
        return "AdamW" if flags.pop() else "Adam"
    warnings.warn(
        f"{first.path} does not say whether it is of Adam or AdamW; it is imported as AdamW's, whose weight decay is "
        "decoupled",
        stacklevel=4,
    )
    return "AdamW"


# -- the engine ---------------------------------------------------------------


def _config(first: Shard) -> dict[str, Any]:
    """Return the saved configuration; empty if it cannot be read."""
    content = first.content.get("ds_config")
    return content if isinstance(content, dict) else {}


def _engine_state(files: SavedFiles) -> dict[str, Any]:
    """Return the state that the engine's ``save_checkpoint`` writes. ``micro_steps``, which DeepSpeed does not save, is
    computed."""
    first = files.models[0]
    steps = checked_entry(first.content, "global_steps", int, str(first.path))
    config = _config(first)
    accumulation, micro_batch, batch = (
        value if type(value := config.get(key)) is int and value > 0 else None
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    if accumulation is None and micro_batch is not None and batch is not None:
        accumulation = batch // (micro_batch * checked_entry(first.content, "dp_world_size", int, str(first.path)))
    accumulation = accumulation or 1
    schedule = first.content.get("lr_scheduler")
    if not (isinstance(schedule, dict) and _fits(schedule, f"{first.path}: lr_scheduler")):
        schedule = None
    for key in ("data_sampler", "random_ltd"):
        if first.content.get(key) is not None:
            warnings.warn(f"{first.path}: {key} is not imported; longshore has no such thing", stacklevel=3)
    return {
        "run": secrets.token_hex(8),
        "global_steps": steps,
        "micro_steps": steps * accumulation,
        "skipped_steps": checked(first.content.get("skipped_steps") or 0, int, f"{first.path}: skipped_steps"),
        "gradient_accumulation_steps": accumulation,
        "loss_scale": _loss_scale(files.optimizers[0]),
        "lr_scheduler": schedule,
    }


def _loss_scale(state: Shard) -> dict[str, Any]:
    """Return the state of a dynamic loss scale; empty without one (the configuration gives a static one)."""
    scaler = state.content["optimizer_state_dict"].get("loss_scaler")
    saved = scaler.state if isinstance(scaler, Inert) else None
    if not isinstance(saved, dict) or "cur_hysteresis" not in saved:
        return {}
    where = f"{state.path}: loss_scaler"
    scale, last = saved.get("cur_scale"), saved.get("last_overflow_iter")
    if type(scale) not in (int, float) or type(last) is not int:
        raise CheckpointError(f"{where} has the scale {scale!r}, and its last overflow at {last!r}: not numbers")
    return {
        "scale": float(scale),  # pyright: ignore[reportArgumentType]
        "hysteresis_left": checked_entry(saved, "cur_hysteresis", int, where),
        "windows": checked_entry(saved, "cur_iter", int, where),
        "last_overflow": last,
    }


def _fits(value: Any, where: str) -> bool:
    """Return whether longshore's format can contain the value; warn if it cannot."""
    try:
        encode(value, where, {})
    except CheckpointError as error:
        warnings.warn(f"left out of the import: {error}", stacklevel=4)
        return False
    return True
