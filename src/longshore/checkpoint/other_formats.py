"""Checkpoints that other libraries wrote, told from folders without any, so that no run begins afresh beside one."""

from __future__ import annotations

from pathlib import Path

from longshore.checkpoint.deepspeed_files import check_not_deepspeeds
from longshore.checkpoint.folder import is_checkpoint
from longshore.errors import CheckpointError

_TORCHS = ".metadata"
"""File of a checkpoint of ``torch.distributed.checkpoint``, beside which are files ``*.distcp``."""


def check_not_others(root: Path, tag: str | None) -> None:
    """Raise CheckpointError, with the way to load it, for a checkpoint of another library.

    Args:
        root: the folder of checkpoints; or that of one checkpoint, as somebody may give it.
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


def _folders(root: Path) -> list[Path]:
    """Return the folders in ``root``; none if one of them is a checkpoint of longshore's."""
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []
    return [] if any(map(is_checkpoint, found)) else found


def _is_torchs(path: Path) -> bool:
    return (path / _TORCHS).is_file() and next(path.glob("*.distcp"), None) is not None
