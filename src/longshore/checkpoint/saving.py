"""Writing a checkpoint: every process its part, and then one of them gives it its name."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from longshore.checkpoint.crew import Crew
from longshore.checkpoint.folder import Draft, prune
from longshore.checkpoint.parts import PartSavePlanner, SavedPart
from longshore.checkpoint.planned import planned, save_alone, words_of
from longshore.checkpoint.storage import SafetensorsWriter
from longshore.checkpoint.tensor_file import TensorFile, TensorHead, WrittenFile, write_json
from longshore.checkpoint.values import Encoder
from longshore.errors import CheckpointError
from longshore.host import PageSnapshot, memory_for_speculation

STATE = "state"
"""Of the file with what is the same on all ranks."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def rank_file(rank: int) -> str:
    """Of the files with what is one rank's own; without a suffix."""
    return f"rank-{rank:05d}"


class Values(NamedTuple):
    """Nested values as they are written: JSON, and tensors beside it."""

    content: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Values:
        """Copies: the values may change afterwards.

        Raises:
            CheckpointError: a value that a checkpoint cannot hold, by its key.
        """
        encoder = Encoder(f"{STATE}.")
        content = {key: encoder.encode(value, key) for key, value in values.items()}
        return cls(content, {name: tensor.to("cpu", copy=True) for name, tensor in encoder.tensors.items()})

    def write(self, folder: Path, stem: str) -> list[WrittenFile]:
        written = [write_json(folder / f"{stem}.json", self.content)]
        if self.tensors:
            heads = [TensorHead(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
            with TensorFile(folder / f"{stem}.safetensors", heads) as file:
                for head in file.heads:
                    file.write(self.tensors[head.name])
                written.append(file.finish())
        return written


class Content(NamedTuple):
    """What a checkpoint is going to hold."""

    parts: list[SavedPart]
    """Of this process."""
    shared: Values
    """The same on all ranks; the first one's are written."""
    own: Values
    """Of this rank."""
    configs: Mapping[str, Any]
    """JSON by the file's name: how the model is built, and how it generates, where it says so."""
    step: int
    run: str
    snapshot: PageSnapshot | None = None
    """That parts are read from; None: they are read from what is trained, which waits."""

    def close(self) -> None:
        """It has been written, or will not be."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.parts.clear()  # with copies of weights: an error's frames may hold this


def prepare(make: Callable[[], Content], crew: Crew) -> Content:
    """What each process of ``crew`` makes; where one fails, all raise."""
    made: list[Content] = []

    def keep() -> None:
        made.append(make())

    try:
        crew.together(keep)
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


def memory_for_snapshot(crew: Crew) -> int:
    """Of the host, in bytes, for pages that are stepped into while others are written; all have to call."""
    machines = crew.gather(platform.node())
    return memory_for_speculation() // machines.count(machines[crew.rank])


class Target(NamedTuple):
    """Where a checkpoint goes."""

    root: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None


def write(content: Content, target: Target, crew: Crew) -> Path:
    """Save; all processes of ``crew`` have to call. Returns the checkpoint's folder.

    Raises:
        CheckpointError: it could not be written; what was there before still is.
        RankError: another process is gone.
    """
    draft: list[Draft] = []

    def begin() -> str:
        draft.append(Draft.begin(target.root, target.tag))
        return str(draft[0].path)

    try:
        path = Path(crew.first(lambda: _explained(begin, target)))
        written = crew.together(lambda: _explained(lambda: _write_own(content, path, crew), target))
        writer = SafetensorsWriter(path, crew.rank, crew.world_size)
        failed = f"{target.root / target.tag} could not be written (those that were there before still are)"
        planner = PartSavePlanner(content.parts)
        if crew.world_size == 1:
            save_alone(writer, planner, failed)
        else:
            planned(save, failed, crew, storage_writer=writer, planner=planner)
        files = [file for each in crew.gather([*written, *writer.files]) for file in each]
        about = {
            "longshore": version("longshore"),
            "torch": str(torch.__version__),
            "step": content.step,
            "run": content.run,
            "world_size": crew.world_size,
        }

        crew.first(lambda: _explained(lambda: _commit(draft[0], files, about, target, content.run), target))
    except BaseException:
        for each in draft:
            each.discard()
        raise
    finally:
        content.close()
    return target.root / target.tag


def _commit(draft: Draft, files: list[WrittenFile], about: Mapping[str, Any], target: Target, run: str) -> None:
    draft.commit(files, about, target.latest)
    if target.keep_last is None:
        return
    try:
        prune(target.root, target.keep_last, run)
    except OSError as error:  # the new one is whole
        warnings.warn(
            f"older checkpoints in {target.root} could not be removed ({words_of(error)}): they stay "
            "until you remove them",
            stacklevel=2,
        )


def _write_own(content: Content, path: Path, crew: Crew) -> list[WrittenFile]:
    if not path.is_dir():
        raise CheckpointError(
            f"this rank does not see {path}, which rank 0 made: checkpoints have to be in a folder that all machines "
            "of the run share"
        )
    written = content.own.write(path, rank_file(crew.rank))
    if crew.rank == 0:
        written += content.shared.write(path, STATE)
        written += [write_json(path / name, config) for name, config in content.configs.items()]
    return written


def _explained(work: Callable[[], Any], target: Target) -> Any:
    try:
        return work()
    except OSError as error:
        raise CheckpointError(
            f"{target.root / target.tag} could not be written: {words_of(error)}; the checkpoints that were there "
            "before still are"
        ) from error
