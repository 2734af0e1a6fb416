"""Finds a checkpoint to load, and verifies it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from longshore.checkpoint.boxes import METADATA, BoxReader
from longshore.checkpoint.files import checked
from longshore.checkpoint.folder import LATEST, MANIFEST, WholeCheckpoint, candidates, check_tag, read_latest, tag_of
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import STATE, rank_file
from longshore.checkpoint.values import read_values
from longshore.errors import CheckpointError


def find(root: Path, tag: str | None, group: RankGroup) -> WholeCheckpoint | None:
    """The checkpoint to load, verified; all ranks of ``group`` have to call, and each reads some of the files.

    Without a tag, damaged checkpoints are skipped, with a warning.

    Returns:
        None if the folder has no checkpoints, and no tag was given.

    Raises:
        CheckpointError: the tag's checkpoint is missing or damaged, or all are.
        ValueError: ``tag`` is not a valid tag.
    """
    if tag is not None:
        check_tag(tag)
    found = group.first(lambda: _listed(root, tag))
    passed: list[str] = []
    if tag is None and group.rank == 0 and found and os.path.lexists(root / LATEST) and read_latest(root) is None:
        warnings.warn(
            f"{root / LATEST} is damaged: it names no tag; the newest complete checkpoint is loaded", stacklevel=4
        )
    for path, error in found:
        problem = error
        if problem is None:
            try:
                return group.together(lambda path=path: _verified(Path(path), group))
            except CheckpointError as failure:
                problem = str(failure)
        if tag is not None:
            raise CheckpointError(problem)
        passed.append(problem)
        if group.rank == 0:
            warnings.warn(f"{problem}; the newest complete checkpoint before it is loaded instead", stacklevel=4)
    if passed:
        raise CheckpointError(f"{root} has no complete checkpoint: {'; '.join(passed)}")
    return None


def _listed(root: Path, tag: str | None) -> list[tuple[str, str | None]]:
    if is_checkpoint(root):
        raise CheckpointError(f"{root} is one checkpoint: give the folder that contains it, and its name as the tag")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file, and checkpoints are in folders")
    found = [(str(path), None if error is None else str(error)) for path, error in candidates(root)]
    if tag is None:
        if not found and root.is_dir():
            halves = [path for path in sorted(root.iterdir()) if is_checkpoint(path) and not path.name.startswith(".")]
            return [(str(path), f"{path} has no {MANIFEST}: it is damaged") for path in halves]
        return found
    mine = [(path, error) for path, error in found if tag_of(Path(path)) == tag]
    return mine or [(str(root / tag), f"there is no checkpoint {root / tag}{_others(found)}")]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint (possibly damaged) rather than a folder of checkpoints."""
    return any((path / name).is_file() for name in (MANIFEST, METADATA))


def _others(found: Sequence[tuple[str, str | None]]) -> str:
    whole = [Path(path).name for path, error in found if error is None]
    return f"; there are {', '.join(whole[:5])}" if whole else ""


def _verified(path: Path, group: RankGroup) -> WholeCheckpoint:
    whole = WholeCheckpoint(path)
    whole.verify(sorted(whole.files)[group.rank :: group.world_size])
    _check_listed(whole, group)
    return whole


def _check_listed(whole: WholeCheckpoint, group: RankGroup) -> None:
    """Check that all files that will be read are in the manifest, and were verified."""
    manifest = str(whole.path / MANIFEST)
    ranks = checked(whole.manifest.get("world_size"), int, f"{manifest}: world_size")
    needed = {METADATA, f"{STATE}.json"}
    # A rank that did not exist when it was saved reads the first rank's file.
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
