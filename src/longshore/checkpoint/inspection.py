"""Describe a folder of checkpoints, and one of its checkpoints, without loading tensors."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longshore.checkpoint.boxes import BoxReader
from longshore.checkpoint.files import DTYPE_NAMES
from longshore.checkpoint.folder import (
    WholeCheckpoint,
    candidates,
    check_tag,
    is_checkpoint,
    of_tag,
    read_latest,
    tag_of,
)
from longshore.checkpoint.model_state import MODEL
from longshore.checkpoint.optimizer_state import FORMAT, OPTIMIZER, STATES_SEED
from longshore.checkpoint.saving import ARITHMETIC_ENTRY, PROCESSOR_ENTRY
from longshore.checkpoint.training_state import CLIENT_STATE, read_description
from longshore.errors import CheckpointError
from longshore.layout.formats import StateFormat


@dataclass(frozen=True)
class TagSummary:
    """A checkpoint of a folder. ``problem`` says why it is damaged; then ``step`` and ``created_ns`` are None."""

    tag: str
    step: int | None
    created_ns: int | None
    num_bytes: int
    latest: bool
    problem: str | None


@dataclass(frozen=True)
class TensorSummary:
    """A tensor; ``dtype`` is its name in safetensors, ``chunks`` the number of boxes in which it is saved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    num_bytes: int


@dataclass(frozen=True)
class GroupSummary:
    """A parameter group of an optimizer."""

    options: dict[str, Any]
    num_parameters: int


@dataclass(frozen=True)
class OptimizerSummary:
    """An optimizer.

    Attributes:
        first_step, last_step: least and most steps of parameters with state, or None.
        states: how many parameters have states of each format (fp32, bf16, 8bit).
        states_seed: the number on which the rounding of states depends that are not float32; None: all are.
    """

    kind: str
    groups: list[GroupSummary]
    num_with_state: int
    first_step: int | None
    last_step: int | None
    states: dict[str, int]
    states_seed: int | None


@dataclass(frozen=True)
class CheckpointSummary:
    """The contents of one checkpoint.

    Attributes:
        longshore, torch: versions that wrote the checkpoint.
        arithmetic: version of the arithmetic of the rules.
        processor: rank 0's kind of processor, such as ``x86_64`` or ``aarch64``; None: not recorded.
        files: sizes in bytes, by name.
        aliases: further names of tied parameters, each with the first name.
        left_out: frozen parameters that were not saved.
        client_state: its keys.
    """

    tag: str
    path: str
    step: int
    created_ns: int
    longshore: str | None
    torch: str | None
    arithmetic: int
    processor: str | None
    world_size: int | None
    run: str | None
    files: dict[str, int]
    tensors: list[TensorSummary]
    aliases: dict[str, str]
    left_out: list[str]
    optimizer: OptimizerSummary | None
    client_state: list[str]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Inspection:
    """The result of :func:`inspect`.

    Attributes:
        tags: checkpoints in the order in which to resume from them; empty if ``path`` is a checkpoint itself.
        checkpoint: the requested checkpoint, or the first complete one; None: there is none.
    """

    path: str
    latest: str | None
    tags: list[TagSummary]
    checkpoint: CheckpointSummary | None

    def to_json(self) -> str:
        """Return the result as a JSON object; numbers that JSON does not have become strings."""
        return json.dumps(_plain(asdict(self)), indent=2, allow_nan=False)


def inspect(path: str | os.PathLike[str], tag: str | None = None, verify: bool = False) -> Inspection:
    """Describe a folder of checkpoints, or one checkpoint. Tensors are not read.

    Args:
        path: the folder that was given to ``save_checkpoint``, or the folder of a checkpoint.
        tag: the checkpoint to describe; None: the one that ``load_checkpoint`` would load.
        verify: read all files and compare their checksums; otherwise only their sizes are compared.

    Raises:
        CheckpointError: there is no checkpoint, or the requested one is damaged.
        ValueError: ``tag`` is not a valid tag.
    """
    root = Path(path).absolute()
    if tag is not None:
        check_tag(tag)
    alone = tag is None and is_checkpoint(root)
    latest = None if alone else read_latest(root)
    found = [(root, None)] if alone else candidates(root)
    if tag is not None:
        of_tag(found, root, tag)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {root}")
    tags: list[TagSummary] = []
    checkpoint: CheckpointSummary | None = None
    for each, problem in found:
        name = tag_of(each)
        try:
            if problem is not None:
                raise problem
            whole = WholeCheckpoint(each)
            if verify and tag in (None, name):
                whole.verify()
            summary = _summary(whole)
        except CheckpointError as error:
            if alone or tag == name:
                raise
            tags.append(TagSummary(name, None, None, _size_of(each), name == latest, str(error)))
            continue
        tags.append(TagSummary(name, whole.step, whole.created_ns, summary.num_bytes, name == latest, None))
        if checkpoint is None and tag in (None, name):
            checkpoint = summary
    return Inspection(str(root), latest, [] if alone else tags, checkpoint)


def _summary(whole: WholeCheckpoint) -> CheckpointSummary:
    values = read_description(whole.path)
    model, about, client = values[MODEL], values.get(OPTIMIZER), values.get(CLIENT_STATE)
    return CheckpointSummary(
        tag=tag_of(whole.path),
        path=str(whole.path),
        step=whole.step,
        created_ns=whole.created_ns,
        longshore=whole.entry("longshore", str),
        torch=whole.entry("torch", str),
        arithmetic=whole.entry(ARITHMETIC_ENTRY, int, 1),
        processor=whole.entry(PROCESSOR_ENTRY, str),
        world_size=whole.entry("world_size", int),
        run=whole.run,
        files={name: written.num_bytes for name, written in whole.files.items()},
        tensors=[
            TensorSummary(name, DTYPE_NAMES[dtype], shape, len(boxes), math.prod(shape) * dtype.itemsize)
            for name, (dtype, shape, boxes) in BoxReader(whole.path).tensors.items()
        ],
        aliases=model["aliases"],
        left_out=model["left_out"],
        optimizer=None if about is None else _optimizer(about),
        client_state=[str(key) for key in client] if isinstance(client, dict) else [],
    )


def _optimizer(about: Mapping[str, Any]) -> OptimizerSummary:
    groups = [GroupSummary(group["options"], len(group["parameters"])) for group in about["groups"]]
    entries = about["parameters"].values()
    steps = [entry["step"] for entry in entries]
    formats = Counter(entry.get(FORMAT, StateFormat.FP32.value) for entry in entries)
    first, last = min(steps, default=None), max(steps, default=None)
    return OptimizerSummary(about["kind"], groups, len(steps), first, last, dict(formats), about.get(STATES_SEED))


def _size_of(path: Path) -> int:
    """Return the size of all files in a folder, which may be damaged or missing."""
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except OSError:
        return 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Tensor):
        return "a tensor"
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
