"""Export a checkpoint's model as safetensors files for ``from_pretrained``, or as a state dict."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.checkpoint.boxes import METADATA, BoxReader, WantedBoxes
from longshore.checkpoint.files import TensorFile, TensorHead, checked, read_json, sync_folder, write_json
from longshore.checkpoint.folder import MANIFEST, WholeCheckpoint, is_checkpoint, take_name
from longshore.checkpoint.model_state import MODEL
from longshore.checkpoint.optimizer_state import OPTIMIZER, array_name
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import CONFIG, GENERATION_CONFIG, STATE
from longshore.checkpoint.training_state import find, read_description
from longshore.errors import CheckpointError
from longshore.kernels.reference import adopted
from longshore.layout.boxes import Box
from longshore.tiles import MASTER

EXPORT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights can be cast to and from. Dtypes of fewer bits are left out, since they need scales."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|config\.json")
_ABOUT = {"format": "pt"}
"""Metadata without which transformers refuses a file."""
_COMPARED_NUMEL = 1 << 20


class Exported(NamedTuple):
    """The result of :func:`export`; ``num_bytes`` is the size of the tensors."""

    path: Path
    tag: str
    step: int
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int


class Weight(NamedTuple):
    """A tensor to export: its name in the checkpoint, its entry in the exported file, and the name of its master, whose
    digits are exported where the tensor is the rounded master."""

    source: str
    head: TensorHead
    master: str | None = None


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
    """Write the weights of a checkpoint as one model, whatever number of ranks and stage it was saved with.

    Parameters and persistent buffers are written whole, and tied ones once, under their first name. ``config.json`` and
    ``generation_config.json`` are written if the checkpoint has them; ``config.json`` gets the dtype of most weights,
    in which transformers loads them. At most one tensor is in memory, with its mapped source, its cast, and up to 64
    MiB of smaller tensors that wait for their checksum. The files are written into a hidden folder beside ``out``,
    which is renamed when all of them are on the disk. A killed process may leave such a folder, which can be removed.

    Args:
        checkpoint: the checkpoint's folder, or the folder that was given to ``save_checkpoint``. All files are
            verified.
        out: a folder that does not exist or is empty.
        max_shard_bytes: maximum bytes of the tensors in a file; a larger tensor gets its own file.
        dtype: for floating-point tensors, one of :data:`EXPORT_DTYPES`; None: as they are. With ``float32``, weights in
            fewer bits are replaced by their masters, which have training's full precision, if the checkpoint has them.
        tag: the checkpoint's tag in the folder; None: ``load_checkpoint``'s choice, with a warning for each damaged
            checkpoint that is skipped.
        overwrite: replace ``out`` if it contains only a former export.
        progress: called with the number of bytes written and the total number of bytes.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not have the whole model, or has values outside of
            ``dtype``'s range; or a disk error. Nothing was changed.
        ValueError: ``out`` is not empty, or an argument is invalid.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a number of bytes, at least 1, not {max_shard_bytes!r}")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(f"weights can be exported as {', '.join(map(str, EXPORT_DTYPES))}, not as {dtype}")
    target = Path(out).resolve()
    _check_target(target, overwrite)
    whole = chosen(Path(checkpoint).absolute(), tag)
    _check_target(target, overwrite, whole.files)
    reader = BoxReader(whole.path)
    weights = weights_of(whole, read_description(whole.path), reader, dtype)
    shards = shards_of(weights, max_shard_bytes)
    with _written_beside(target, overwrite, whole.files) as folder:
        _write_shards(folder, shards, reader, progress)
        for name in (CONFIG, GENERATION_CONFIG):
            if name in whole.files:
                content = checked(read_json(whole.path / name), dict, str(whole.path / name))
                write_json(folder / name, _with_dtype(content, weights) if name == CONFIG else content)
        whole.check_unchanged()
        names = tuple(sorted(os.listdir(folder)))
    num_bytes = sum(weight.head.num_bytes for weight in weights)
    return Exported(target, whole.tag, whole.step, names, len(weights), num_bytes)


def chosen(path: Path, tag: str | None) -> WholeCheckpoint:
    """Find and verify the checkpoint to export; ``path`` is its folder, or the folder of checkpoints.

    Raises:
        CheckpointError: it is missing or damaged.
        ValueError: ``tag`` is not a valid tag.
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
    whole: WholeCheckpoint,
    values: Mapping[str, Any],
    reader: BoxReader,
    dtype: torch.dtype | None,
    all_of_it: bool = True,
) -> list[Weight]:
    """Return the weights in a checkpoint, in the model's order: parameters, then buffers.

    Raises:
        CheckpointError: it is damaged; or, with ``all_of_it``, frozen parameters were left out.
    """
    left_out, parameters = values[MODEL]["left_out"], values[MODEL]["parameters"]
    if left_out and all_of_it:
        raise CheckpointError(
            f"{whole.path} was saved without frozen parameters ({left_out[0]!r}, {len(left_out)} of them) and does not "
            "have the whole model: load it into the model, and save that with exclude_frozen_parameters=False"
        )
    for name in sorted({METADATA, f"{STATE}.json", *reader.files()} - whole.files.keys()):
        raise CheckpointError(f"{whole.path} is damaged: its {MANIFEST} does not list {name}, and it was not verified")
    saved = reader.of_kind(MODEL)
    lost = [name for name in parameters if name not in saved]
    if lost:
        raise CheckpointError(f"{whole.path} is damaged: {METADATA} has no {MODEL}.{lost[0]}, which {STATE}.json names")
    masters = {
        name
        for name, entry in (values.get(OPTIMIZER) or {"parameters": {}})["parameters"].items()
        if dtype is torch.float32 and MASTER in entry["arrays"]
    }
    weights = []
    for name in dict.fromkeys([*parameters, *saved]):
        found, shape = saved[name].dtype, saved[name].shape
        head = TensorHead(name, dtype if dtype is not None and found in EXPORT_DTYPES else found, shape)
        source, master = f"{MODEL}.{name}", array_name(MASTER, name) if name in masters else None
        if master is not None and reader.tensor(master).shape != shape:
            raise CheckpointError(f"{whole.path} is damaged: {master} does not have the shape of {source}")
        weights.append(Weight(source, head, master))
    if not weights:
        raise CheckpointError(f"{whole.path} has no weights")
    return weights


def shards_of(weights: Sequence[Weight], max_shard_bytes: int) -> dict[str, list[Weight]]:
    """Divide the weights into files, by name."""
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
    reader: BoxReader,
    progress: Callable[[int, int], None],
) -> None:
    total = sum(weight.head.num_bytes for group in shards.values() for weight in group)
    done = 0
    progress(done, total)
    for name, group in shards.items():
        weights = {weight.head: weight for weight in group}
        with TensorFile(folder / name, weights, _ABOUT) as file:
            for head in file.heads:
                file.write(read_weight(reader, weights[head]))
                done += head.num_bytes
                progress(done, total)
            file.finish()
    if len(shards) > 1:
        places = {weight.head.name: name for name, group in shards.items() for weight in group}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def read_weight(reader: BoxReader, weight: Weight) -> Tensor:
    """Read a whole tensor, in the dtype of its entry. Its files are unmapped afterwards."""
    head, found = weight.head, dict[str, Tensor]()
    wanted = [
        WantedBoxes(name, head.shape, [Box.whole(head.shape)], functools.partial(found.__setitem__, name))
        for name in (weight.source, weight.master)
        if name is not None
    ]
    reader.check(wanted)
    reader.read(wanted)
    values = found[weight.source]
    if weight.master is not None:
        values = adopted(found[weight.master], values)
    return (values if values.dtype == head.dtype else _cast(values, head)).view(head.shape)


def _cast(values: Tensor, head: TensorHead) -> Tensor:
    cast = values.to(head.dtype)
    most = torch.finfo(head.dtype).max
    if most < torch.finfo(values.dtype).max:
        # Compare in blocks, since a comparison needs more memory than the tensor.
        for given, found in zip(values.split(_COMPARED_NUMEL), cast.split(_COMPARED_NUMEL), strict=True):
            lost = given[found.isinf() & given.isfinite()]
            if lost.numel() > 0:
                raise CheckpointError(
                    f"{head.name} has the value {lost[0].item():.3g}, and the largest {head.dtype} is {most:.3g}: "
                    "export as another dtype"
                )
    return cast


def _with_dtype(config: Mapping[str, Any], weights: Sequence[Weight]) -> dict[str, Any]:
    """Return the configuration with the dtype of most weights, to which transformers casts them when loading. The saved
    dtype may differ from it."""
    numels: Counter[torch.dtype] = Counter()
    for _, head, _ in weights:
        if head.dtype in EXPORT_DTYPES:
            numels[head.dtype] += math.prod(head.shape)
    if not numels:
        return dict(config)
    name = str(numels.most_common(1)[0][0]).removeprefix("torch.")
    # Versions of transformers before 5 write "torch_dtype", and all versions read it.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, name)}


def _check_target(out: Path, overwrite: bool, written: Collection[str] = (GENERATION_CONFIG,)) -> None:
    """Raise ValueError if files would be lost. A ``generation_config.json`` counts as part of a former export only if
    it is written again: users add one themselves for older checkpoints, which have none."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ValueError(f"{out} is not a folder, as an export is; choose another name")
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
    """Yield a new folder, which is renamed to ``out`` at the end, or removed after an exception."""
    folder = out.with_name(f".{out.name}.writing-{secrets.token_hex(4)}")
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            yield folder
            sync_folder(folder)
            _check_target(out, overwrite, written)  # again: it may have changed
            asides = take_name(folder, out, f".{out.name}.replaced")
            sync_folder(out.parent)
            for aside in asides:
                shutil.rmtree(aside, ignore_errors=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}; its files were removed"
        ) from error


def whole_state_dict(
    checkpoint: str | os.PathLike[str], tag: str | None = None, exclude_frozen: bool = False
) -> dict[str, Tensor]:
    """Return float32 weights on the CPU, under all names that the model has for them; tied weights are one tensor.

    Args:
        checkpoint: the folder that was given to ``save_checkpoint``, or that of one checkpoint.
        tag: the checkpoint's tag; None: the latest.
        exclude_frozen: leave out parameters that were not trained.

    Returns:
        Weights (masters if there are any) and floating-point buffers as float32; other buffers as they are.

    Raises:
        CheckpointError: it is missing, damaged, or does not have the whole model.
        ValueError: ``tag`` is not a valid tag.
    """
    whole = chosen(Path(checkpoint).absolute(), tag)
    values, reader = read_description(whole.path), BoxReader(whole.path)
    stepped = (values.get(OPTIMIZER) or {"parameters": {}})["parameters"]
    frozen = {name for name in values[MODEL]["parameters"] if exclude_frozen and name not in stepped}
    found: dict[str, Tensor] = {}
    for weight in weights_of(whole, values, reader, torch.float32, all_of_it=not exclude_frozen):
        if weight.head.name not in frozen:
            found[weight.head.name] = read_weight(reader, weight)
    whole.check_unchanged()
    return found | {name: found[first] for name, first in values[MODEL]["aliases"].items() if first in found}
