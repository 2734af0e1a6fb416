"""Waiting for collectives: a rank that waits hears which others are missing, and one that never ends is let go."""

from __future__ import annotations

import contextlib
import ctypes
import math
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.errors import LongshoreError, RankError, debugging
from longshore.ranks.presence import ADVICE, presence, words
from longshore.transfer.runner import exiting, park_until

_SLICE = timedelta(milliseconds=200)
_GRACE_S = 1.0
_LEFT: list[tuple[Any, Any]] = []
"""Groups, with the tensors that they use, each with its last collective."""
_LOCK = threading.Lock()

T = TypeVar("T")

_POLL_S = 0.0005
_DEFAULT_TIMEOUT_S = 1800.0
_NOTICE_S = 30.0
_NOTICE_DEBUGGING_S = 1.0


def wait_for(work: Any, unless: threading.Event | None = None, gone: Callable[[], Sequence[int]] = tuple) -> None:
    """Wait for a collective of gloo, for as long as the group's own timeout allows; raise its error. Once ``unless`` is
    set, do not wait for it.

    ``gone`` returns the ranks that are missing. A collective that is not done a little later never will be: gloo does
    not tell the ranks that exchange nothing with those directly, nor of a network that is cut.

    A thread in ``work.wait()`` must not come back from it while Python shuts down: see ``longshore.transfer.runner``.
    So it comes back now and then, and once the process is about to end, it waits in Python, and goes on only if another
    thread waits for its job.
    """
    until = math.inf
    while not (exiting.is_set() or work.is_completed()):
        if unless is not None and unless.is_set():
            return
        if time.monotonic() > until:
            let_go((), work)
            raise ConnectionError("another rank does not answer")
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                break  # this raises its own error below
            if until == math.inf and gone():
                until = time.monotonic() + _GRACE_S
    if exiting.is_set():
        park_until(work.is_completed)  # which keeps the interpreter's lock
    work.wait()


def let_go(group: tuple[Any, ...], latest: Any) -> None:
    """Drop the last references to a group and its tensors, as soon as that takes no time.

    Dropping it waits for its ``latest`` collective, until the group's timeout if no other rank comes. A thread for that
    would end the process with SIGABRT if the collective ended while Python shuts down. So the group is dropped when
    this is called again after the collective has ended, and at the end of the process not at all: the references that
    are counted here outlive Python.
    """
    with _LOCK:
        done = [entry for entry in _LEFT if entry[1].is_completed()]
        _LEFT[:] = [entry for entry in _LEFT if not entry[1].is_completed()]
        if latest is not None and not latest.is_completed():
            _LEFT.append((group, latest))
            for each in (group, latest):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    for entry in done:
        for each in entry:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))


def notice_s() -> float:
    """Return how long a rank waits for the others before it logs a warning."""
    return _NOTICE_DEBUGGING_S if debugging() else _NOTICE_S


def _ranks_of(group: Any) -> Sequence[int]:
    """Return the ranks of a group, by their numbers in the default process group; none if that was destroyed, where a
    save in the background may go on with its own group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return ()


def missing(ranks: Sequence[int]) -> Sequence[int]:
    """Return the ranks for which some of these wait in vain; see :meth:`Presence.missing`."""
    here = presence()
    return () if here is None else here.missing(ranks)


@contextlib.contextmanager
def communicating(ranks: Sequence[int], advice: str = ADVICE) -> Iterator[None]:
    """Context of calls of torch.distributed, whose errors become a RankError that names who is missing of ``ranks``."""
    try:
        yield
    except LongshoreError:
        raise
    except (RuntimeError, ConnectionError) as failure:
        # torch.distributed raises this when a peer is gone or late. A traceback into torch would not help users.
        here = presence()
        gone = [] if here is None else here.who_broke(ranks)
        rank = dist.get_rank() if dist.is_initialized() else "?"
        raise RankError(
            f"rank {rank}: a collective failed ({_essence(failure)}), so {words(gone)}; {advice}"
        ) from failure.with_traceback(None)


def finish(work: Any, group: Any, device: torch.device | None = None, advice: str = ADVICE) -> None:
    """Wait for a collective of ``group``.

    Args:
        device: device of its tensors; None: the CPU.

    Raises:
        RankError: a rank is missing.
    """
    ranks = _ranks_of(group)
    with communicating(ranks, advice):
        if device is None or device.type == "cpu":
            try:
                wait_for(work, None, lambda: missing(ranks))
            except BaseException:
                let_go((group,), work)  # to destroy the group would wait for it
                raise
            return
        while not work.is_completed():
            if missing(ranks):
                abort(group, device)
                raise ConnectionError("another rank does not answer")
            time.sleep(_POLL_S)
        work.wait()


def abort(group: Any, device: torch.device) -> None:
    """End the collectives of ``group`` that are under way on ``device``; raise RuntimeError if that is not possible."""
    aborting: Any = group
    with contextlib.suppress(RuntimeError):
        aborting = group._get_backend(device)
    try:
        aborting.abort()
    except AttributeError as error:
        raise RuntimeError(str(error)) from error


def gather_rows(row: Tensor, group: Any, advice: str = ADVICE) -> Tensor:
    """Return every rank's ``row``, on the CPU and equally long, as ``[world_size, numel]``."""
    count = dist.get_world_size(group)
    rows = torch.empty(count * row.numel(), dtype=row.dtype)
    with communicating(_ranks_of(group), advice):
        work = all_gather_single(rows, row, group)
    finish(work, group, advice=advice)
    return rows.view(count, -1)


def gather_objects(value: T, group: Any, advice: str = ADVICE) -> list[T]:
    """Return every rank's value, by rank, over a ``group`` of gloo.

    Raises:
        RankError: a rank is missing.
    """
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = gather_rows(torch.tensor([own.numel()]), group, advice).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: own.numel()] = own
    rows = gather_rows(padded, group, advice)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather_from_all(what: str, value: T, doing: str = "") -> list[T]:
    """Return the value of each rank of the default process group; see :meth:`Presence.gather`."""
    here = presence()
    if here is None:
        return [value]
    return here.gather(what, value, _patience_s(), notice_s(), doing)


def _patience_s() -> float:
    world: Any = dist.group.WORLD
    for device in getattr(world, "_device_types", ()):
        if (found := timeout_of(world, device)) is not None:
            return found.total_seconds()
    return _DEFAULT_TIMEOUT_S


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return how long collectives of ``group`` wait; None if torch does not say, and its default applies.

    torch (2.8 to 2.13) has a public way to set the timeout, and none to read it. A new group does not inherit it.
    """
    try:
        found = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) and found > timedelta(0) else None


def all_gather_single(output: Tensor, part: Tensor, group: Any) -> Any:
    """Gather equal parts, flat, in the order of the ranks; return the handle."""
    # In older torch the same call has a longer name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=True)


def _essence(failure: Exception) -> str:
    """Return the first sentence of a message, without the line of C++ that it comes from."""
    first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    return re.sub(r"^\[\S+:\d+\]\s*", "", first).partition(". ")[0].rstrip(".")
