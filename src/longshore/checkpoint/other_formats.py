"""Checkpoints that other libraries wrote, told from folders without any, so that no run begins afresh beside one."""

from __future__ import annotations

import re
from pathlib import Path

from longshore.checkpoint.folder import LATEST, check_tag, is_checkpoint, open_regular
from longshore.errors import CheckpointError

_DEEPSPEEDS = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_LONGEST_LATEST = 4096
_TORCHS = ".metadata"
"""File of a checkpoint of ``torch.distributed.checkpoint``, beside which are files ``*.distcp``."""


def check_not_others(root: Path, tag: str | None) -> None:
    """Raise CheckpointError, with the way to load it, for a checkpoint of another library.

    Args:
        root: the folder of checkpoints, or of one checkpoint.
        tag: the checkpoint's tag; None: whichever is there.
    """
    check_not_deepspeeds(root, tag)
    for path in [root, *_folders(root)] if tag is None else [root / tag]:
        if _is_torchs(path):
            raise CheckpointError(
                f"{path} was written by torch.distributed.checkpoint: load it with its own load(), into "
                "get_state_dict() of the model and of an optimizer of longshore without an engine, having left out the "
                "masters that no checkpoint of torch.optim has; longshore.save() then writes what engines load, too "
                '(docs/from_fsdp2.md, "Checkpoints of torch.distributed.checkpoint", has the lines)'
            )


def is_deepspeed(source: Path, tag: str | None) -> bool:
    """Return whether DeepSpeed wrote the checkpoint with that tag (None: the one that ``latest`` names)."""
    try:
        folder = source / check_tag(_latest_in(source) if tag is None else tag)
        names = [path.name for path in folder.iterdir()]
    except (CheckpointError, ValueError, OSError):
        return False
    return any(map(_DEEPSPEEDS.fullmatch, names)) and not is_checkpoint(folder)


def _latest_in(source: Path) -> str:
    """Return the tag in ``latest``, around which there may be blanks."""
    with open_regular(source / LATEST) as file:
        return file.read(_LONGEST_LATEST).decode().strip()


def check_not_deepspeeds(root: Path, tag: str | None) -> None:
    """Raise CheckpointError for a checkpoint of DeepSpeed, so that a run that should resume does not start afresh.

    Args:
        root: the folder of checkpoints, or of one checkpoint.
        tag: the checkpoint's tag; None: the one that ``latest`` names.
    """
    if tag is None and is_deepspeed(root.parent, root.name):
        root, tag = root.parent, root.name
    if is_deepspeed(root, tag):
        tagged = "" if tag is None else f" --tag {tag}"
        raise CheckpointError(
            f"the checkpoint in {root} is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out "
            f"FOLDER{tagged}`, copy to FOLDER what transformers or Accelerate saved beside it (not the folder that was "
            "converted), and load FOLDER"
        )


def _folders(root: Path) -> list[Path]:
    """Return the folders in ``root``; none if one of them is a checkpoint of longshore's."""
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []
    return [] if any(map(is_checkpoint, found)) else found


def _is_torchs(path: Path) -> bool:
    return (path / _TORCHS).is_file() and next(path.glob("*.distcp"), None) is not None
