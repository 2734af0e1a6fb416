"""Reading a checkpoint: found, verified and compared as a whole before anything changes."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from longshore.checkpoint.crew import Crew
from longshore.checkpoint.folder import MANIFEST, WholeCheckpoint, candidates, check_tag, tag_of
from longshore.checkpoint.parts import PartLoadPlanner, WantedPart
from longshore.checkpoint.reading import checked, read_json
from longshore.checkpoint.saving import STATE, first_of, rank_file
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
    found = [(str(path), None if error is None else str(error)) for path, error in candidates(root)]
    if tag is None:
        return found
    mine = [(path, error) for path, error in found if tag_of(Path(path)) == tag]
    return mine or [(str(root / tag), f"there is no checkpoint {root / tag}{_others(found)}")]


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


def load_parts(path: Path, parts: Sequence[WantedPart], crew: Crew, begin: Callable[[], None] = lambda: None) -> None:
    """Read what each process wants; all have to call. ``begin`` is called when all of it was found there.

    Raises:
        CheckpointError: a tensor is not there, or the disk fails half way.
    """
    reader = SafetensorsReader(path)
    metadata = crew.together(reader.read_metadata)

    def plan() -> None:
        planner = PartLoadPlanner(parts)
        planner.set_up_planner({}, metadata)
        reader.check(planner.create_local_plan(), metadata)

    crew.together(plan)
    crew.together(begin)
    alone = crew.world_size == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({}, storage_reader=reader, planner=PartLoadPlanner(parts), process_group=crew.group, no_dist=alone)
    except CheckpointException as failure:
        raise first_of(failure, f"{path} could be read in part only; load again before going on", alone) from failure
    except RuntimeError as error:
        crew.gather(None)  # says so where another rank is gone
        raise CheckpointError(f"{path} could be read in part only: {error}; load again before going on") from error
