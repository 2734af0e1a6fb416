"""Writes a checkpoint: every rank its files into a draft, which the first rank then commits."""

from __future__ import annotations

import logging
import platform
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from longshore.checkpoint.boxes import BoxSavePlanner, SavedBox
from longshore.checkpoint.folder import Draft, prune
from longshore.checkpoint.rank_group import RankGroup, reason_of, run_planned, save_alone
from longshore.checkpoint.storage import SafetensorsWriter
from longshore.checkpoint.tensor_file import TensorFile, TensorHead, WrittenFile, write_json
from longshore.checkpoint.values import Encoder
from longshore.errors import CheckpointError
from longshore.host import PageSnapshot, memory_for_speculation

_LOGGER = logging.getLogger("longshore")

STATE = "state"
"""Stem of the files with values that are the same on all ranks."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def rank_file(rank: int) -> str:
    """Stem of a rank's private files."""
    return f"rank-{rank:05d}"


class Values(NamedTuple):
    """Nested values as they are written: JSON and tensors."""

    content: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Values:
        """Copy values, which may change afterwards.

        Raises:
            CheckpointError: a value that a checkpoint cannot contain, by its key.
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
    """What a rank writes into a checkpoint.

    Attributes:
        boxes: this rank's.
        shared: values that are the same on all ranks; the first rank's are written.
        own: values of this rank.
        configs: the model's JSON files by name: its configuration, and that of generation.
        step: steps of the run.
        run: its name.
        snapshot: where optimizer state is read from; None: from the optimizer, which waits.
    """

    boxes: list[SavedBox]
    shared: Values
    own: Values
    configs: Mapping[str, Any]
    step: int
    run: str
    snapshot: PageSnapshot | None = None

    def close(self) -> None:
        """Free copies, after writing or giving up."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.boxes.clear()  # they have copies of weights, and an exception's frames may refer to this


def prepare(make: Callable[[], Content], group: RankGroup) -> Content:
    """Make the content on each rank; if that fails on one, all raise."""
    made: list[Content] = []
    try:
        group.together(lambda: made.append(make()))
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


def memory_for_snapshot(group: RankGroup) -> int:
    """Bytes of host memory for a snapshot, divided among the machine's ranks; all ranks have to call."""
    machines = group.gather(platform.node())
    return memory_for_speculation() // machines.count(machines[group.rank])


class Target(NamedTuple):
    """Where a checkpoint is written."""

    root: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None


def write(content: Content, target: Target, group: RankGroup) -> Path:
    """Write a checkpoint, atomically; all ranks of ``group`` have to call. Returns its folder.

    Raises:
        CheckpointError: it could not be written; existing checkpoints are unchanged.
        RankError: another rank has ended.
    """
    draft: list[Draft] = []

    def begin() -> str:
        draft.append(Draft.begin(target.root, target.tag))
        return str(draft[0].path)

    try:
        path = Path(group.first(lambda: _explained(begin, target)))
        written = group.together(lambda: _explained(lambda: _write_own(content, path, group), target))
        writer = SafetensorsWriter(path, group.rank, group.world_size)
        failed = f"{target.root / target.tag} could not be written (existing checkpoints are unchanged)"
        planner = BoxSavePlanner(content.boxes)
        if group.world_size == 1:
            save_alone(writer, planner, failed)
        else:
            run_planned(save, failed, group, storage_writer=writer, planner=planner)
        files = [file for each in group.gather([*written, *writer.files]) for file in each]
        about = {
            "longshore": version("longshore"),
            "torch": str(torch.__version__),
            "step": content.step,
            "run": content.run,
            "world_size": group.world_size,
        }

        group.first(lambda: _explained(lambda: _commit(draft[0], files, about, target, content.run), target))
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
    except OSError as error:  # the new one is complete
        warnings.warn(
            f"older checkpoints in {target.root} could not be removed ({reason_of(error)}): remove them yourself",
            stacklevel=2,
        )


def _write_own(content: Content, path: Path, group: RankGroup) -> list[WrittenFile]:
    if not path.is_dir():
        raise CheckpointError(
            f"this rank does not see {path}, which rank 0 made: checkpoints have to be in a folder that all machines "
            "of the run share"
        )
    written = content.own.write(path, rank_file(group.rank))
    if group.rank == 0:
        written += content.shared.write(path, STATE)
        written += [write_json(path / name, config) for name, config in content.configs.items()]
    return written


def _explained(work: Callable[[], Any], target: Target) -> Any:
    try:
        return work()
    except OSError as error:
        raise CheckpointError(
            f"{target.root / target.tag} could not be written: {reason_of(error)}; existing checkpoints are unchanged"
        ) from error


class Background:
    """Runs one task at a time on a thread. Its exception is logged at once, and raised by the next :meth:`wait`."""

    def __init__(self) -> None:
        self._done: threading.Event | None = None
        """Set when the task ends. Thread.join() cannot be used: after Ctrl-C in it, the thread counts as ended."""
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.is_set()

    def start(self, work: Callable[[], object], what: str, give_up: Callable[[], None]) -> None:
        """Start a task, after :meth:`wait` for the last one.

        Args:
            work: the task; a process that ends waits for it.
            what: its description, for the log.
            give_up: called instead, if no thread can be started.
        """
        assert self._done is None
        done = threading.Event()

        def run() -> None:
            try:
                work()
            except BaseException as failure:
                # Its frames refer to the content.
                traceback.clear_frames(failure.__traceback__)
                self._failure = failure
                _LOGGER.error("%s failed: %s", what, failure)
            finally:
                done.set()

        thread = threading.Thread(target=run, name="longshore-checkpoint")
        self._done = done
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # otherwise it runs, and Ctrl-C interrupted start()
                self._done = None
                give_up()
            raise

    def wait(self) -> None:
        """Wait for the task, and raise its exception, once. Ctrl-C ends the wait, not the task."""
        if self._done is not None:
            self._done.wait()
            self._done = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
