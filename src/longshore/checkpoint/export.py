"""A checkpoint's model as safetensors files that ``from_pretrained`` of transformers loads, one tensor at a time."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.checkpoint.boxes import Box, BoxLoadPlanner, WantedBox, stored, tensors_of
from longshore.checkpoint.deepspeed import import_deepspeed
from longshore.checkpoint.deepspeed_files import is_deepspeed
from longshore.checkpoint.folder import MANIFEST, WholeCheckpoint, sync_folder
from longshore.checkpoint.loading import find, is_checkpoint
from longshore.checkpoint.model_state import KIND
from longshore.checkpoint.optimizer_state import array_name, checked_about
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.reading import checked, read_json
from longshore.checkpoint.saving import CONFIG, GENERATION_CONFIG, STATE
from longshore.checkpoint.storage import METADATA, SafetensorsReader
from longshore.checkpoint.tensor_file import TensorFile, TensorHead, write_json
from longshore.checkpoint.training_state import OPTIMIZER
from longshore.errors import CheckpointError
from longshore.host import MASTER

EXPORT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""That weights can be cast to, and from: numbers of fewer bits mean something only together with their scales."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|config\.json")
_ABOUT = {"format": "pt"}
"""transformers refuses files without."""
_COMPARED_NUMEL = 1 << 20


class Exported(NamedTuple):
    """What :func:`export` wrote."""

    path: Path
    """Of the folder."""
    tag: str
    """Of the checkpoint."""
    step: int
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    """Of the tensors."""


class Weight(NamedTuple):
    """A tensor that is exported."""

    source: str
    """Its name in the checkpoint."""
    head: TensorHead
    """As it is written."""


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    *,
    tag: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the weights of a checkpoint as one model, whatever number of ranks and stage it was saved by.

    Parameters and persistent buffers, each whole; tied ones once, under the first of their names. ``config.json`` and
    ``generation_config.json`` are there where the checkpoint has them; the former names the dtype that most of the
    weights have, in which they are loaded. No more than one tensor is in memory, besides what of it was mapped to be
    read, its cast, and up to 64 MiB of smaller ones that wait for their checksum. The files are written into a hidden
    folder beside ``out``, which gets its name when all of them are on the disk; what is left of a process that was
    killed can be removed.

    Args:
        checkpoint: its folder, or the one that was given to ``save_checkpoint``. All of its files are verified.
        out: a folder that is not there or is empty.
        max_shard_bytes: of the tensors in a file; a larger tensor has a file of its own.
        dtype: for floating-point tensors, one of :data:`EXPORT_DTYPES`; None: as they are. ``float32``, of weights in
            fewer bits: their masters, where the checkpoint has them, with all digits that training had.
        tag: in the folder; None: as ``load_checkpoint`` chooses, with a warning for a damaged one that it passes over.
        overwrite: replace ``out`` where it has nothing but a former export.
        progress: called with the bytes that were written, and all.

    Raises:
        CheckpointError: the checkpoint is not there or damaged, has not all of the model, or has values that
            ``dtype`` has not; or the disk refuses. Nothing changed then.
        ValueError: ``out`` has something in it, or an argument that cannot be.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is a number of bytes, at least 1, not {max_shard_bytes!r}")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(f"weights can be exported as {', '.join(map(str, EXPORT_DTYPES))}, not as {dtype}")
    target = Path(out).resolve()
    _check_target(target, overwrite)
    whole = chosen(Path(checkpoint).absolute(), tag)
    _check_target(target, overwrite, whole.files)
    reader = SafetensorsReader(whole.path)
    weights = weights_of(whole, reader, dtype)
    shards = shards_of(weights, max_shard_bytes)
    with _written_beside(target, overwrite, whole.files) as folder:
        _write_shards(folder, shards, reader, progress)
        if CONFIG in whole.files:
            config = checked(read_json(whole.path / CONFIG), dict, str(whole.path / CONFIG))
            write_json(folder / CONFIG, _with_dtype(config, [weight.head for weight in weights]))
        if GENERATION_CONFIG in whole.files:
            where = whole.path / GENERATION_CONFIG
            write_json(folder / GENERATION_CONFIG, checked(read_json(where), dict, str(where)))
        whole.check_unchanged()
        names = tuple(sorted(os.listdir(folder)))
    num_bytes = sum(weight.head.num_bytes for weight in weights)
    return Exported(target, whole.tag, whole.step, names, len(weights), num_bytes)


def chosen(path: Path, tag: str | None) -> WholeCheckpoint:
    """The checkpoint in a folder, or the folder that is one; verified.

    Raises:
        CheckpointError: it is not there, or not whole.
        ValueError: no tag.
    """
    if tag is None and is_checkpoint(path):
        whole = WholeCheckpoint(path)
        whole.verify()
        return whole
    found = find(path, tag, RankGroup())
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def weights_of(
    whole: WholeCheckpoint, reader: SafetensorsReader, dtype: torch.dtype | None, all_of_it: bool = True
) -> list[Weight]:
    """What a checkpoint has of a model, in its order: parameters, then buffers.

    Raises:
        CheckpointError: it is damaged; or, with ``all_of_it``, frozen parameters were left out.
    """
    where = str(whole.path / f"{STATE}.json")
    about = checked(read_json(whole.path / f"{STATE}.json"), dict, where)
    model = checked(about.get(KIND), dict, f"{where}: {KIND}")
    left_out = checked(model.get("left_out"), list, f"{where}: left_out")
    if left_out and all_of_it:
        raise CheckpointError(
            f"{whole.path} was saved without frozen parameters ({left_out[0]!r}, {len(left_out)} of them) and has not "
            "all of the model: load it into the model, and save that with exclude_frozen_parameters=False"
        )
    metadata = reader.read_metadata()
    files = {METADATA, f"{STATE}.json", *(where.file for where in metadata.storage_data.values())}
    for name in sorted(files - whole.files.keys()):
        raise CheckpointError(f"{whole.path} is damaged: its {MANIFEST} does not list {name}, and it was not verified")
    sources = {name.removeprefix(f"{KIND}."): name for name in tensors_of(metadata) if name.startswith(f"{KIND}.")}
    parameters = [
        checked(name, str, f"{where}: parameters")
        for name in checked(model.get("parameters"), list, f"{where}: parameters")
    ]
    lost = [name for name in parameters if name not in sources]
    if lost:
        raise CheckpointError(f"{whole.path} is damaged: {METADATA} has no {lost[0]}, which {where} names")
    weights = []
    masters = _masters_of(about, where) if dtype is torch.float32 else frozenset()
    for name in dict.fromkeys([*parameters, *sources]):
        entry = stored(metadata, sources[name])
        found = entry.properties.dtype
        head = TensorHead(name, dtype if dtype is not None and found in EXPORT_DTYPES else found, tuple(entry.size))
        source = array_name(MASTER, name) if name in masters else sources[name]
        if stored(metadata, source).size != entry.size:
            raise CheckpointError(f"{whole.path} is damaged: {source} has not the shape of {sources[name]}")
        weights.append(Weight(source, head))
    if not weights:
        raise CheckpointError(f"{whole.path} has no weights")
    return weights


def _masters_of(about: Mapping[str, Any], where: str) -> frozenset[str]:
    """The parameters that have one, and are its rounded values."""
    if about.get(OPTIMIZER) is None:
        return frozenset()
    entries = checked_about(about[OPTIMIZER], f"{where}: {OPTIMIZER}")["parameters"]
    return frozenset(
        name for name, entry in entries.items() if MASTER in entry["arrays"] and entry.get("published") is True
    )


def shards_of(weights: Sequence[Weight], max_shard_bytes: int) -> dict[str, list[Weight]]:
    """Files by name, each with the weights that follow each other and fit into it."""
    groups: list[list[Weight]] = [[]]
    num_bytes = 0
    for weight in weights:
        if groups[-1] and num_bytes + weight.head.num_bytes > max_shard_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(weight)
        num_bytes += weight.head.num_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{place:05d}-of-{len(groups):05d}.safetensors": group for place, group in enumerate(groups, 1)}


def _write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[Weight]],
    reader: SafetensorsReader,
    progress: Callable[[int, int], None],
) -> None:
    total = sum(weight.head.num_bytes for group in shards.values() for weight in group)
    done = 0
    progress(done, total)
    for name, group in shards.items():
        sources = {weight.head.name: weight.source for weight in group}
        with TensorFile(folder / name, [weight.head for weight in group], _ABOUT) as file:
            for head in file.heads:
                file.write(read_weight(reader, sources[head.name], head))
                done += head.num_bytes
                progress(done, total)
            file.finish()
    if len(shards) > 1:
        places = {weight.head.name: name for name, group in shards.items() for weight in group}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def read_weight(reader: SafetensorsReader, source: str, head: TensorHead) -> Tensor:
    """All of a tensor, in the dtype of ``head``. Its files are mapped only meanwhile: nothing of others stays."""
    metadata = reader.read_metadata()
    held: list[Tensor] = []
    part = WantedBox(source, head.shape, Box((0,) * len(head.shape), head.shape), held.append)
    planner = BoxLoadPlanner([part])
    planner.set_up_planner({}, metadata)
    reader.read_data(planner.create_local_plan(), planner)
    (values,) = held
    return values if values.dtype == head.dtype else _cast(values, head)


def _cast(values: Tensor, head: TensorHead) -> Tensor:
    cast = values.to(head.dtype)
    most = torch.finfo(head.dtype).max
    if most < torch.finfo(values.dtype).max:
        # Some at a time: what such a comparison needs is larger than the tensor.
        flat, flat_cast = values.reshape(-1), cast.reshape(-1)
        for given, found in zip(flat.split(_COMPARED_NUMEL), flat_cast.split(_COMPARED_NUMEL), strict=True):
            lost = given[found.isinf() & given.isfinite()]
            if lost.numel() > 0:
                raise CheckpointError(
                    f"{head.name} has the value {lost[0].item():.3g}, and {head.dtype} ends at {most:.3g}: export as "
                    "another dtype"
                )
    return cast


def _with_dtype(config: Mapping[str, Any], heads: Sequence[TensorHead]) -> dict[str, Any]:
    """A configuration of transformers that says the dtype which most of the weights have: they are cast to it when
    they are loaded, and what it was when the model was built need not be that."""
    numels: dict[torch.dtype, int] = {}
    for head in heads:
        if head.dtype in EXPORT_DTYPES:
            numels[head.dtype] = numels.get(head.dtype, 0) + head.num_bytes // head.dtype.itemsize
    if not numels:
        return dict(config)
    name = str(max(numels, key=lambda dtype: numels[dtype])).removeprefix("torch.")
    # The second is what versions before 5 write, and all read.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, name)}


def _check_target(out: Path, overwrite: bool, written: Collection[str] = (GENERATION_CONFIG,)) -> None:
    """Raises ValueError where something would be lost. A ``generation_config.json`` is that of a former export only if
    it is written again: older checkpoints have none, and people put one there."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ValueError(f"{out} is no folder: an export is one; choose another name")
    names = sorted(os.listdir(out))
    if names and not overwrite:
        raise ValueError(f"{out} is not empty: choose another folder, or overwrite a former export (overwrite=True)")
    own = [name for name in names if _OWN_NAMES.fullmatch(name) or (name == GENERATION_CONFIG and name in written)]
    others = [name for name in names if name not in own or not (out / name).is_file()]
    if others:
        raise ValueError(
            f"{out} has {others[0]}, which no export wrote, and overwriting replaces the folder: move it away, or "
            "choose another folder"
        )


@contextlib.contextmanager
def _written_beside(out: Path, overwrite: bool, written: Collection[str]) -> Iterator[Path]:
    """A new folder, which becomes ``out`` at the end, and goes where that is not reached."""
    folder, aside = (out.with_name(f".{out.name}.{word}-{secrets.token_hex(4)}") for word in ("writing", "replaced"))
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            yield folder
            sync_folder(folder)
            _check_target(out, overwrite, written)  # it took a while
            _replace(folder, out, aside)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}; nothing of it is left"
        ) from error


def _replace(folder: Path, out: Path, aside: Path) -> None:
    replaced = out.is_dir()
    if replaced:
        os.rename(out, aside)
    try:
        os.rename(folder, out)
    except BaseException:
        if replaced:
            os.rename(aside, out)
        raise
    sync_folder(out.parent)
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)


def whole_state_dict(
    checkpoint: str | os.PathLike[str], tag: str | None = None, exclude_frozen: bool = False
) -> dict[str, Tensor]:
    """Float32 weights on the CPU under all names that the model has for them, tied ones as one tensor.

    Args:
        checkpoint: what was given to ``save_checkpoint``, of longshore or of DeepSpeed (ZeRO 1, 2 and 3); or one
            checkpoint of longshore's.
        tag: in the folder; None: the latest.
        exclude_frozen: leave out parameters that were not trained.

    Returns:
        Masters, where there are some, and floating-point buffers, as float32; other buffers as they are.

    Raises:
        CheckpointError: it is not there, damaged, or has not all of the model.
        ValueError: no tag.
    """
    root = Path(checkpoint).absolute()
    if not is_deepspeed(root, tag):
        return dict(_tensors(chosen(root, tag), exclude_frozen))
    with tempfile.TemporaryDirectory(prefix="longshore-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are about values that are no weights
        return dict(_tensors(chosen(import_deepspeed(root, Path(folder), tag), None), exclude_frozen))


def _tensors(whole: WholeCheckpoint, exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    where = str(whole.path / f"{STATE}.json")
    about = checked(read_json(whole.path / f"{STATE}.json"), dict, where)
    model = checked(about.get(KIND), dict, f"{where}: {KIND}")
    parameters = set(checked(model.get("parameters"), list, f"{where}: parameters"))
    optimizer = about.get(OPTIMIZER)
    stepped = set() if optimizer is None else set(checked_about(optimizer, f"{where}: {OPTIMIZER}")["parameters"])
    frozen = parameters - stepped if exclude_frozen else set()
    reader = SafetensorsReader(whole.path)
    found: dict[str, Tensor] = {}
    for weight in weights_of(whole, reader, torch.float32, all_of_it=not exclude_frozen):
        if weight.head.name not in frozen:
            found[weight.head.name] = _with_master(reader, weight, array_name(MASTER, weight.head.name))
            yield weight.head.name, found[weight.head.name]
    for name, first in checked(model.get("aliases"), dict, f"{where}: aliases").items():
        if first in found:
            yield name, found[first]
    whole.check_unchanged()


def _with_master(reader: SafetensorsReader, weight: Weight, master: str) -> Tensor:
    """Elements whose weight is the rounded master with all of its digits, as training would go on from them."""
    values = read_weight(reader, weight.source, weight.head)
    metadata = reader.read_metadata()
    if weight.source == master or master not in tensors_of(metadata):
        return values
    digits = read_weight(reader, master, weight.head)
    return torch.where(digits.to(stored(metadata, weight.source).properties.dtype).float() == values, digits, values)
