"""Reading a checkpoint: found, verified and compared as a whole before anything changes."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from longshore.checkpoint.crew import Crew
from longshore.checkpoint.folder import LATEST, MANIFEST, WholeCheckpoint, candidates, check_tag, read_latest, tag_of
from longshore.checkpoint.parts import PartLoadPlanner, WantedPart
from longshore.checkpoint.planned import planned
from longshore.checkpoint.reading import checked, read_json
from longshore.checkpoint.saving import STATE, rank_file
from longshore.checkpoint.storage import METADATA, SafetensorsReader, opened
from longshore.checkpoint.values import decode
from longshore.errors import CheckpointError


def find(root: Path, tag: str | None, crew: Crew) -> WholeCheckpoint | None:
    """The checkpoint to load, verified; all processes of ``crew`` have to call.

    Each of them reads a part of the files. Without a tag a damaged checkpoint is passed over, with a warning.

    Returns:
        None where the folder has none at all, and no tag was asked for.

    Raises:
        CheckpointError: that tag is not there or not whole, or none is.
        ValueError: no tag.
    """
    if tag is not None:
        check_tag(tag)
    found = crew.first(lambda: _listed(root, tag))
    passed: list[str] = []
    if tag is None and crew.rank == 0 and found and os.path.lexists(root / LATEST) and read_latest(root) is None:
        warnings.warn(
            f"{root / LATEST} is damaged: it names no tag; the newest whole checkpoint is loaded", stacklevel=4
        )
    for path, error in found:
        problem = error
        if problem is None:
            try:
                return crew.together(lambda path=path: _verified(Path(path), crew))
            except CheckpointError as failure:
                problem = str(failure)
        if tag is not None:
            raise CheckpointError(problem)
        passed.append(problem)
        if crew.rank == 0:
            warnings.warn(f"{problem}; the newest whole checkpoint before it is loaded instead", stacklevel=4)
    if passed:
        raise CheckpointError(f"{root} has no whole checkpoint: {'; '.join(passed)}")
    return None


def _listed(root: Path, tag: str | None) -> list[tuple[str, str | None]]:
    if is_checkpoint(root):
        raise CheckpointError(f"{root} is one checkpoint: give the folder that it lies in, and its name as the tag")
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
    """Whether a folder is one, be it damaged, and not one that has some."""
    return any((path / name).is_file() for name in (MANIFEST, METADATA))


def _others(found: Sequence[tuple[str, str | None]]) -> str:
    whole = [Path(path).name for path, error in found if error is None]
    return f"; there are {', '.join(whole[:5])}" if whole else ""


def _verified(path: Path, crew: Crew) -> WholeCheckpoint:
    whole = WholeCheckpoint(path)
    whole.verify(sorted(whole.files)[crew.rank :: crew.world_size])
    _check_listed(whole, crew)
    return whole


def _check_listed(whole: WholeCheckpoint, crew: Crew) -> None:
    """What is going to be read is what was verified."""
    manifest = str(whole.path / MANIFEST)
    ranks = checked(whole.manifest.get("world_size"), int, f"{manifest}: world_size")
    needed = {METADATA, f"{STATE}.json"}
    # Who was not there when it was saved reads what the first one wrote.
    own = rank_file(crew.rank if crew.rank < ranks else 0)
    if ranks > 0:
        needed.add(f"{own}.json")
    beside = (f"{STATE}.safetensors", f"{own}.json", f"{own}.safetensors")
    needed |= {name for name in beside if os.path.lexists(whole.path / name)}
    if crew.rank == 0:
        needed |= {where.file for where in SafetensorsReader(whole.path).read_metadata().storage_data.values()}
    missing = sorted(needed - whole.files.keys())
    if missing:
        raise CheckpointError(f"{manifest} does not list {missing[0]}, which belongs to the checkpoint: it is damaged")
    if ranks > 0:
        read_values(whole.path, own)  # nothing has changed yet


def read_values(path: Path, stem: str) -> dict[str, Any]:
    """Nested values of a checkpoint; see :class:`longshore.checkpoint.saving.Values`.

    Raises:
        CheckpointError: they are damaged.
    """
    file = path / f"{stem}.json"
    content = checked(read_json(file), dict, str(file))

    values: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        tensors: list[Any] = []
        left: set[str] = set()

        def tensor(name: str) -> Tensor:
            if not tensors:
                tensors.append(stack.enter_context(opened(path / f"{stem}.safetensors")))
                left.update(tensors[0].keys())
            if name not in left:
                raise CheckpointError(f"{path / stem}.safetensors has no {name}, which {file} names, or names twice")
            # Named once: a short file could ask for any amount of copies.
            left.remove(name)
            return tensors[0].get_tensor(name).clone()

        for key, value in content.items():
            values[key] = decode(value, tensor, f"{file}: {key}")
    return values


def check_parts(reader: SafetensorsReader, parts: Sequence[WantedPart], crew: Crew) -> None:
    """All that each process wants is there; all have to call. Raises CheckpointError, and nothing was loaded."""

    def plan() -> None:
        planner, metadata = PartLoadPlanner(parts), reader.read_metadata()
        planner.set_up_planner({}, metadata)
        reader.check(planner.create_local_plan(), metadata)

    crew.together(plan)


def load_parts(reader: SafetensorsReader, parts: Sequence[WantedPart], crew: Crew) -> None:
    """Read what each process wants, and :func:`check_parts` found; all have to call.

    Raises:
        CheckpointError: the disk fails half way.
    """
    failed = f"{reader.path} could be read in part only; load again before going on"
    planned(load, failed, crew, storage_reader=reader, planner=PartLoadPlanner(parts))
