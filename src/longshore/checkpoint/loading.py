"""Reading a checkpoint: found, verified and compared as a whole before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from longshore.checkpoint.crew import Crew
from longshore.checkpoint.folder import WholeCheckpoint, candidates, check_tag
from longshore.checkpoint.parts import PartLoadPlanner, WantedPart
from longshore.checkpoint.reading import checked, read_json
from longshore.checkpoint.saving import first_of
from longshore.checkpoint.storage import SafetensorsReader, opened
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
    mine = [(path, error) for path, error in found if _tag_of(Path(path)) == tag]
    return mine or [(str(root / tag), f"there is no checkpoint {root / tag}{_others(found)}")]


def _tag_of(path: Path) -> str:
    """Also of one that was on its way out."""
    return path.name.removeprefix(".replaced-").rpartition("-")[0] if path.name.startswith(".") else path.name


def _others(found: Sequence[tuple[str, str | None]]) -> str:
    whole = [Path(path).name for path, error in found if error is None]
    return f"; there are {', '.join(whole[:5])}" if whole else ""


def _verified(path: Path, crew: Crew) -> WholeCheckpoint:
    whole = WholeCheckpoint(path)
    whole.verify(sorted(whole.files)[crew.rank :: crew.world_size])
    return whole


def read_values(path: Path, stem: str) -> dict[str, Any]:
    """Nested values of a checkpoint; see :class:`longshore.checkpoint.saving.Values`.

    Raises:
        CheckpointError: they are damaged.
    """
    file = path / f"{stem}.json"
    content = checked(read_json(file), dict, str(file))

    def tensor(name: str) -> Tensor:
        with opened(path / f"{stem}.safetensors") as tensors:
            if name not in tensors.keys():  # noqa: SIM118 - no mapping
                raise CheckpointError(f"{path / stem}.safetensors has no {name}, which {file} names")
            return tensors.get_tensor(name).clone()

    return {key: decode(value, tensor, f"{file}: {key}") for key, value in content.items()}


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
        planner.create_local_plan()

    crew.together(plan)
    crew.together(begin)
    alone = crew.world_size == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({}, storage_reader=reader, planner=PartLoadPlanner(parts), process_group=crew.group, no_dist=alone)
    except CheckpointException as failure:
        raise first_of(failure, f"{path} could be read in part only; load again before going on", alone) from failure
