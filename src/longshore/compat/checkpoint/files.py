"""Read files of DeepSpeed's ``save_checkpoint`` without DeepSpeed, and without running code that they name.

The files are pickles. torch's restricted unpickler reads tensors, numbers, text and containers; the few objects of
DeepSpeed's own classes are replaced by :class:`Inert`. A file that needs anything else is rejected.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longshore import CheckpointError
from longshore.seam import LATEST, check_tag, checked_entry, is_checkpoint

_LONGEST_LATEST = 4096
_MOST_VALUES = 3_000_000
_LARGEST_EXPANDED_BYTES = 1 << 26
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
# Old versions of DeepSpeed wrote no underscore before "optim_states".
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_?optim_states\.pt")
_OTHER = re.compile(r"layer_\d+.*\.pt|expp_rank_.*\.pt|.*_expert_.*\.pt")

_INERT_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    # Many scripts have these in their client state.
    "argparse.Namespace",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
)
"""Classes and functions that :class:`Inert` replaces."""


class Inert:
    """Replaces an object whose class is not loaded. ``state`` is the object's state in the file, or None."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        """Accept and ignore the arguments that the class would get."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Shard(NamedTuple):
    """One file and its content."""

    path: Path
    content: dict[str, Any]


class SavedFiles(NamedTuple):
    """All files of a checkpoint: the model's file (at stage 3 one for each rank), and each rank's optimizer file."""

    folder: Path
    models: Sequence[Shard]
    optimizers: Sequence[Shard]


def read_files(source: Path, tag: str | None) -> SavedFiles:
    """Read a checkpoint by its tag; None: the one that ``latest`` names. Tensors stay in the files until used.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, of a kind that cannot be read, or needs code to be run.
        ValueError: ``tag`` is not a valid tag.
    """
    tag = _tag_in(source) if tag is None else check_tag(tag)
    folder = source / tag
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}{_others(source)}")
    names = sorted(path.name for path in folder.iterdir())
    other = [name for name in names if _OTHER.fullmatch(name)]
    if other:
        raise CheckpointError(
            f"{folder / other[0]} belongs to a pipeline or to experts, and only models without these are imported"
        )
    models, optimizers = _by_rank(folder, names, _MODEL), _by_rank(folder, names, _OPTIMIZER)
    if not models and is_checkpoint(folder):
        raise CheckpointError(f"{folder} is a checkpoint of longshore's already: load it, or `longshore export` it")
    if not models:
        raise CheckpointError(f"{folder} has no file with a model (mp_rank_00_model_states.pt): it is not a checkpoint")
    first = _read(models[0])
    ranks = checked_entry(first.content, "dp_world_size", int, str(first.path))
    if first.content.get("param_shapes") is None:
        raise CheckpointError(
            f"{first.path} was saved without ZeRO or without an optimizer, and does not say which state is which "
            "parameter's; stages 1, 2 and 3 are imported"
        )
    if first.content.get("num_experts") or first.content.get("ds_autoep_layers"):
        raise CheckpointError(f"{first.path} has a model with experts, which are not imported")
    if first.content.get("mp_world_size", 1) != 1:
        raise CheckpointError(f"{first.path} has a model-parallel model, which is not imported")
    _check_ranks(folder, "optimizer states", optimizers, ranks)
    if models[0].name.startswith("zero_"):
        _check_ranks(folder, "model states", models, ranks)
    others = [_read(path) for path in models[1:]]
    return SavedFiles(folder, [first, *others], [_read(path) for path in optimizers])


def _tag_in(source: Path) -> str:
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}")
    if any(_MODEL.fullmatch(path.name) for path in source.iterdir()):
        raise CheckpointError(
            f"{source} is one checkpoint: give the folder that contains it, and its name ({source.name}) as the tag"
        )
    if not (source / LATEST).is_file():
        raise CheckpointError(f"{source} has no file `{LATEST}` that names the newest; give a tag{_others(source)}")
    try:
        with open(source / LATEST, "rb") as file:
            return check_tag(file.read(_LONGEST_LATEST).decode().strip())
    except OSError as error:
        raise CheckpointError(f"{source / LATEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{source / LATEST} names no checkpoint: {error}") from error


def _others(source: Path) -> str:
    if not source.is_dir():
        return ""
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    found = [path.name for path in folders if any(_MODEL.fullmatch(each.name) for each in path.iterdir())]
    return f"; there are {', '.join(found[:5])}" if found else ""


def _by_rank(folder: Path, names: Iterable[str], pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of one kind in the order of their ranks; :func:`_check_ranks` finds missing ones."""
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match["part"]) > 0:
            raise CheckpointError(f"{folder / name} is one shard of a model-parallel model (mp_rank): not imported")
        rank = int(match["rank"] or 0)
        if rank in found:
            raise CheckpointError(f"{folder} has {found[rank].name} and {name}, which are the same rank's; keep one")
        found[rank] = folder / name
    return [found[rank] for rank in sorted(found)]


def _check_ranks(folder: Path, what: str, files: Sequence[Path], ranks: int) -> None:
    numbers = [int(re.findall(r"pp_rank_(\d+)", path.name)[0]) for path in files]
    missing = sorted({*range(ranks)} - {*numbers})
    if missing:
        raise CheckpointError(
            f"{folder} lacks the {what} of rank {', '.join(map(str, missing[:10]))}: {ranks} ranks saved it, and files "
            f"of {len(files)} are there; copy those of all machines into one folder"
        )
    if len(files) != ranks:
        raise CheckpointError(f"{folder} has {what} of {len(files)} ranks, and {ranks} saved it: it is a mixture")


def _read(path: Path) -> Shard:
    """Read one file. Raises CheckpointError if it is damaged, or contains anything but values."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    stand_ins: list[Any] = [(Inert, name) for name in _INERT_NAMES]
    try:
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise CheckpointError(
                f"{path} is damaged, or not a file of DeepSpeed's: it cannot be read as tensors and plain values"
            ) from error
        raise CheckpointError(
            f"{path} needs {found[1]} to be loaded, and an import runs no code that a file names: it reads tensors, "
            "numbers and text. Save again without it (for example in client_state)"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # an unpickler raises anything for untrusted bytes
        first_line = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {first_line}") from error
    _check_size(content, path)
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{path} is not a dictionary, as DeepSpeed's files are")
    return Shard(path, dict(content))


def _check_size(content: Any, path: Path) -> None:
    """Raise CheckpointError for a short file that expands to much data: repeated references, or expanded tensors."""
    left, count = [content], 0
    while left:
        value = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise CheckpointError(
                f"{path} has more than {_MOST_VALUES} values, more than any such file has: it is damaged"
            )
        if isinstance(value, torch.Tensor):
            stored = 0 if value.is_meta or value.layout != torch.strided else value.untyped_storage().nbytes()
            if value.numel() * value.itemsize > max(stored, _LARGEST_EXPANDED_BYTES):
                raise CheckpointError(f"{path} has a tensor {list(value.shape)}, and not its elements: it is damaged")
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
