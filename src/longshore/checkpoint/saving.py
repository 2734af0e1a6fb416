"""Write a checkpoint: every rank writes its files into a draft, which the first rank then commits. It says which
arithmetic its run had.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import platform
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from longshore.checkpoint.boxes import METADATA, SavedBoxes, parsed_metadata, write_boxes
from longshore.checkpoint.files import WrittenFile, write_json
from longshore.checkpoint.folder import (
    LATEST,
    Draft,
    WholeCheckpoint,
    check_latest,
    prune,
    read_latest,
)
from longshore.checkpoint.rank_group import RankGroup, reason_of
from longshore.checkpoint.values import Values
from longshore.errors import CheckpointError, LongshoreError, RankError
from longshore.kernels import ARITHMETIC
from longshore.tiles import StateSnapshot, memory_for_speculation

ARITHMETIC_ENTRY = "arithmetic"
"""Entry of the manifest: version of the arithmetic of all rules. Checkpoints without it have version 1."""
PROCESSOR_ENTRY = "processor"
"""Entry of the manifest: the processor of rank 0, as ``platform.machine()`` names it."""

T = TypeVar("T")

_LOGGER = logging.getLogger("longshore")

_COMMIT_S = 6.0
"""How long a rank waits for the first one to commit a checkpoint, after another one was lost."""
_RENAMING_S = 1.0
_POLL_S = 0.05

STATE = "state"
"""Stem of the files with values that are the same on all ranks."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def arithmetic_entries() -> dict[str, Any]:
    """Return the entries of the manifest of a new checkpoint."""
    return {ARITHMETIC_ENTRY: ARITHMETIC, PROCESSOR_ENTRY: platform.machine()}


def report_arithmetic(whole: WholeCheckpoint) -> None:
    """Warn if a run goes on with other bits than where it was saved; for one rank, once its optimizer is loaded."""
    theirs = whole.entry(ARITHMETIC_ENTRY, int, 1)
    if theirs != ARITHMETIC:
        warnings.warn(
            f"the checkpoint is of a run with version {theirs} of the arithmetic, and this longshore computes version "
            f"{ARITHMETIC}: the run goes on with other last bits than there (the changelog says which rules changed)",
            stacklevel=2,
        )
    processor = whole.entry(PROCESSOR_ENTRY, str)
    if processor is not None and processor != (own := platform.machine()):
        warnings.warn(
            f"the checkpoint was written on {processor}, and this is {own}: longshore's steps have the same bits on "
            "both, but what torch computes on the CPU (forward, backward, its own optimizers, Newton-Schulz, random "
            "numbers) has other last bits",
            stacklevel=2,
        )


def rank_file(rank: int) -> str:
    """Return the stem of a rank's private files."""
    return f"rank-{rank:05d}"


def configs_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the configurations of a model, if it has them as in transformers, by the names of their files."""
    content = _content_of(getattr(model, "config", None), CONFIG)
    if content is None:
        return {}
    if "model_type" in content and not content.get("architectures"):
        name = type(getattr(model, "_orig_mod", model)).__name__
        # fully_shard gives the model a class whose name has this prefix.
        content["architectures"] = [name.removeprefix("FSDP") if hasattr(model, "unshard") else name]
    generation = _content_of(getattr(model, "generation_config", None), GENERATION_CONFIG)
    return {CONFIG: content} if generation is None else {CONFIG: content, GENERATION_CONFIG: generation}


def _content_of(config: Any, file: str) -> dict[str, Any] | None:
    """Return the content of the file; None, with a warning, if it is not valid JSON. A checkpoint can do without."""
    to_json = getattr(config, "to_json_string", None)
    if config is None or isinstance(config, (dict, torch.Tensor)) or not callable(to_json):
        return None
    try:
        text = to_json()
        content = json.loads(text) if isinstance(text, str) else None
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"the checkpoint has no {file}: {type(config).__name__} has values that are not JSON ({error})",
            stacklevel=2,
        )
        return None
    return content if isinstance(content, dict) else None


class Content(NamedTuple):
    """The content that a rank writes into a checkpoint.

    Attributes:
        boxes: the boxes that this rank writes.
        shared: values that are the same on all ranks; the first rank's are written.
        own: values of this rank.
        configs: the model's JSON files by name: its configuration and its generation configuration.
        step: the number of steps of the run.
        run: the name of the run.
        snapshot: the source of optimizer state; None: the optimizer itself, while training waits.
    """

    boxes: list[SavedBoxes]
    shared: Values
    own: Values
    configs: Mapping[str, Any]
    step: int
    run: str
    snapshot: StateSnapshot | None = None

    def close(self) -> None:
        """Free copies, after writing has ended or was abandoned."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.boxes.clear()  # boxes have copies of weights, and an exception's frames may refer to this object


def prepare(make: Callable[[], Content], group: RankGroup) -> Content:
    """Make the content on each rank; if that fails on one rank, all ranks raise."""
    made: list[Content] = []
    try:
        group.together(lambda: made.append(make()))
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


def memory_for_snapshot(group: RankGroup) -> int:
    """Return bytes of host memory for a snapshot, divided among the machine's ranks; all ranks have to call it."""
    machines = group.gather(platform.node())
    return memory_for_speculation() // machines.count(machines[group.rank])


class Target(NamedTuple):
    """The place where a checkpoint is written."""

    root: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None


def write(content: Content, target: Target, group: RankGroup) -> Path:
    """Write a checkpoint atomically, and return its folder; all ranks of ``group`` have to call it.

    Raises:
        CheckpointError: the checkpoint could not be written; existing checkpoints are unchanged.
        RankError: another rank has ended, and the checkpoint is not complete, as far as this rank can see.
    """
    draft: list[Draft] = []
    written: list[_Unfinished] = []
    committed = False

    def begin() -> Path:
        if target.latest:
            check_latest(target.root)
        draft.append(Draft(target.root, target.tag))
        return draft[0].path

    def commit(ranks: list[_Written]) -> None:
        nonlocal committed
        _commit(draft[0], ranks, content, target)
        committed = True

    def write_files() -> _Written:
        mine = _write_files(content, path, group)
        written.append(_Unfinished(path, target))
        return mine

    try:
        path = group.first(lambda: _explained(begin, target))
        mine = group.together(lambda: _explained(write_files, target))
        ranks = group.gather(mine)
        group.first(lambda: _explained(lambda: commit(ranks), target))
    except BaseException as error:
        if committed and isinstance(error, RankError):
            _LOGGER.error("%s is complete, and another rank did not hear of it: %s", target.root / target.tag, error)
            return target.root / target.tag
        for each in draft:
            each.discard()
        if group.rank > 0 and group.lost and written and isinstance(error, RankError):
            written[0].finish(error)
            return target.root / target.tag
        raise
    finally:
        content.close()
    return target.root / target.tag


class _Unfinished:
    """A checkpoint to which this rank has written its files, and which the first rank has still to commit: whether it
    did so, this rank sees on the disk, if the ranks cannot tell each other any more.

    Args:
        draft: the folder into which the ranks write, and which gets another name at the end.
    """

    def __init__(self, draft: Path, target: Target) -> None:
        self._draft, self._target = draft, target
        self._identity = _identity_of(draft)

    def finish(self, error: RankError) -> None:
        """Wait for a while until the first rank has committed the checkpoint; raise ``error``, with the state of the
        checkpoint, if it has not."""
        path = self._target.root / self._target.tag
        until = time.monotonic() + _COMMIT_S
        gone_until = math.inf
        while not self._is_whole or not self._is_latest:
            now = time.monotonic()
            if not self._is_renamed and not self._draft.exists():
                # It was given up. A network file system may show the new name later than that the old one is gone.
                gone_until = min(gone_until, now + _RENAMING_S)
            if now > min(until, gone_until):
                break
            time.sleep(_POLL_S)
        else:
            _LOGGER.error("%s is complete, and the ranks could not tell each other: %s", path, error)
            return
        if self._is_whole:
            raise RankError(
                f"{error}; {path} is complete, and {self._target.root / LATEST} does not name it: load it by its tag"
            ) from error
        if gone_until < math.inf:
            raise error
        raise RankError(
            f"{error}; this rank does not see whether the first rank completed {path}: "
            f"look at it with `longshore inspect {self._target.root} --verify`"
        ) from error

    @property
    def _is_renamed(self) -> bool:
        # A former checkpoint of the tag, possibly of the same content, is another folder.
        return _identity_of(self._target.root / self._target.tag) == self._identity

    @property
    def _is_whole(self) -> bool:
        if not self._is_renamed:
            return False
        try:
            WholeCheckpoint(self._target.root / self._target.tag)
        except (CheckpointError, OSError):
            return False
        return True

    @property
    def _is_latest(self) -> bool:
        return not self._target.latest or read_latest(self._target.root) == self._target.tag


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_Written = tuple[list[WrittenFile], dict[str, Any]]
"""The files that a rank wrote, and the metadata of the boxes in them."""


def _write_files(content: Content, path: Path, group: RankGroup) -> _Written:
    if not path.is_dir():
        raise CheckpointError(
            f"this rank does not see {path}, which rank 0 made: checkpoints have to be in a folder that all machines "
            "of the run share"
        )
    written, tensors = write_boxes(path, content.boxes, group.rank, group.world_size)
    written += content.own.write(path, rank_file(group.rank))
    if group.rank == 0:
        written += content.shared.write(path, STATE)
        written += [write_json(path / name, config) for name, config in content.configs.items()]
    return written, tensors


def _commit(draft: Draft, ranks: list[_Written], content: Content, target: Target) -> None:
    tensors: dict[str, Any] = {}
    for _, theirs in ranks:
        for name, entry in theirs.items():
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
    metadata = {"tensors": tensors}
    parsed_metadata(metadata, target.tag)  # the boxes of all ranks together have to cover every tensor
    files = [file for theirs, _ in ranks for file in theirs]
    about = {
        "longshore": version("longshore"),
        "torch": str(torch.__version__),
        **arithmetic_entries(),
        "step": content.step,
        "run": content.run,
        "world_size": len(ranks),
    }
    draft.commit([*files, write_json(draft.path / METADATA, metadata)], about, target.latest)
    if target.keep_last is None:
        return
    try:
        prune(target.root, target.keep_last, content.run)
    except OSError as error:  # the new checkpoint is complete all the same
        warnings.warn(
            f"older checkpoints in {target.root} could not be removed ({reason_of(error)}): remove them yourself",
            stacklevel=2,
        )


def _explained(work: Callable[[], T], target: Target) -> T:
    try:
        return work()
    except LongshoreError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{target.root / target.tag} could not be written: {reason_of(error)}; existing checkpoints are unchanged"
        ) from error


class Background:
    """Runs one task at a time on a thread. Its exception is logged at once, and raised by the next :meth:`wait`; if the
    program ends without, its exit code is 1."""

    _untold: ClassVar[list[Background]] = []

    def __init__(self) -> None:
        self._done: threading.Event | None = None
        """Set when the task ends. Thread.join() cannot be used: after Ctrl-C in it, the thread counts as ended."""
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.is_set()

    def start(self, work: Callable[[], object], what: str, give_up: Callable[[], None]) -> None:
        """Start a task; call :meth:`wait` for the previous task first.

        Args:
            work: the task; the process does not end before it.
            what: its description, for the log.
            give_up: called instead, if no thread can be started.
        """
        assert self._done is None
        done = threading.Event()

        def run() -> None:
            try:
                work()
            except BaseException as failure:
                # The exception's frames refer to the content, which would not be freed.
                traceback.clear_frames(failure.__traceback__)
                self._failure = failure
                self._untold.append(self)
                _LOGGER.error("%s failed: %s", what, failure)
            finally:
                done.set()

        thread = threading.Thread(target=run, name="longshore-checkpoint")
        self._done = done
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # otherwise the thread runs, and Ctrl-C interrupted start()
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
            self._untold.remove(self)
            raise failure

    @classmethod
    def at_exit(cls) -> None:
        """End the process with the exit code 1 if a checkpoint could not be written and no call has raised that."""
        if cls._untold:
            _LOGGER.error("the program ends with exit code 1: its last checkpoint was not written")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)  # an exception here would not change the exit code


atexit.register(Background.at_exit)
