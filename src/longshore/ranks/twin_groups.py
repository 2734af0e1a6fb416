"""Process groups of the same ranks as another one, for one thread alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longshore.errors import LongshoreError
from longshore.ranks.waiting import finish, gather_from_all, gather_objects, timeout_of


def twin_of(
    group: Any, device: torch.device, backend: str | None = None, ranks: list[int] | None = None, doing: str = ""
) -> Any:
    """Make a process group of the same ranks for one thread alone; all ranks of the default group have to call this
    function, those of another group for theirs.

    Collectives of one group are told apart by their order only. The user's own (a mean of losses to log), and those of
    a second engine, run while the thread's are under way: in one group they would be confused with each other.

    Args:
        group: the group whose ranks and timeout are taken; None: the default group, of all ranks.
        device: device of the tensors.
        backend: a backend other than the group's.
        ranks: only these of the group's ranks.
        doing: this rank's action, for messages.
    """
    group = dist.group.WORLD if group is None else group
    ranks = sorted(dist.get_process_group_ranks(group) if ranks is None else ranks)
    # torch's new_group() does not say which rank it waits for, so all are there before it is called, also where their
    # groups differ: without the others (use_local_synchronization=True) torch names a group by its ranks and by how
    # many groups there are; after one was destroyed, the next has its name, and finds its addresses in the store.
    parts = sorted({tuple(each): each for each in gather_from_all("making process groups", ranks, doing)}.values())
    timeout = timeout_of(group, device)
    made = [dist.new_group(part, timeout=timeout, backend=backend) for part in parts]
    mine: Any = made[parts.index(ranks)]
    if dist.get_backend(mine) == "gloo":
        # It connects its ranks at once. One that is done first, and that destroys the group without having used it,
        # would break the connection that another is still making.
        finish(dist.barrier(mine, async_op=True), mine)
    return mine


class Twins(NamedTuple):
    """Two process groups of the same ranks: one for tensors, and one of gloo for messages.

    With a device's own backend each meeting would wait for the device, and for a rank that is gone for ever. On the CPU
    both are one group.
    """

    data: Any
    control: Any
    kind: _Kind | None = None
    """What ``data`` can be used for again, after :meth:`end`."""

    def end(self, clean: bool) -> None:
        """Destroy both groups; if all ranks have launched the same collectives in it, as far as this one knows
        (``clean``), keep that for tensors for the next twins."""
        if clean and self.kind is not None:
            _idle.setdefault(self.kind, []).append(self.data)
        for group in {self.control} if clean and self.kind is not None else {self.data, self.control}:
            dist.destroy_process_group(group)


class _Kind(NamedTuple):
    """Process groups of a kind are alike."""

    ranks: tuple[int, ...]
    timeout: timedelta | None
    device: str


_idle: dict[_Kind, list[Any]] = {}
"""Groups for tensors that were used and are clean: torch gives the communicators of a device 32 streams in turn, and
ranks could wait for each other for ever if one of them shared its stream with gathers of FSDP2."""


LEAST_QUEUES = 8
"""CUDA's default number of hardware queues, for streams that run at once."""


def refuse_ordered_launches(environ: Mapping[str, str]) -> None:
    """Refuse settings with which CUDA runs collectives in the order in which this process launches them.

    The thread of collectives launches its own beside those of the training thread (FSDP2's gathers, SyncBatchNorm's
    means), and which of two comes first differs between ranks. That is no harm where both run at once.

    Raises:
        LongshoreError: one of them is set.
    """
    queues = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdigit() and int(queues) < LEAST_QUEUES:
        setting = f"CUDA_DEVICE_MAX_CONNECTIONS={queues}"
        what = f"unset it, or set it to {LEAST_QUEUES} or more (at most 32)"
    elif environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0"):
        setting, what = "NCCL_LAUNCH_ORDER_IMPLICIT=1", "unset it"
    else:
        return
    raise LongshoreError(
        f"{setting} lets a rank's collectives run in the order in which its threads launch them, which is another one "
        f"on each rank, so that ranks could wait for each other for ever: {what}"
    )


def twins_of(group: Any, device: torch.device, ranks: list[int] | None = None) -> Twins:
    """Make both groups; see :func:`twin_of`.

    Raises:
        LongshoreError: see :func:`refuse_ordered_launches`.
    """
    if device.type == "cuda":
        refuse_ordered_launches(os.environ)
    if device.type == "cpu":
        data = twin_of(group, device, ranks=ranks)
        return Twins(data, data)
    control = twin_of(group, device, "gloo", ranks)
    kind = _Kind(tuple(dist.get_process_group_ranks(control)), timeout_of(control, torch.device("cpu")), str(device))
    data = _again(kind, control)
    return Twins(twin_of(group, device, ranks=ranks) if data is None else data, control, kind)


def _again(kind: _Kind, control: Any) -> Any | None:
    """Return an idle group that each of its ranks has; None: a new one has to be made, by all ranks."""
    idle = _idle[kind] = [each for each in _idle.get(kind, ()) if _exists(each)]
    names = {each.group_name: each for each in idle}
    whole = len(kind.ranks) == dist.get_world_size()
    said = (kind.ranks, set(names))
    # Where there are other groups, all of them make new ones, or none does.
    everyone = gather_objects(said, control) if whole else gather_from_all("using process groups again", said)
    common: dict[tuple[int, ...], set[str]] = {}
    for ranks, theirs in everyone:
        common[ranks] = common.get(ranks, theirs) & theirs
    if not all(common.values()):
        return None
    found = names[min(common[kind.ranks])]
    idle.remove(found)
    return found


def _exists(group: Any) -> bool:
    """Return whether the group is one of the present default group's."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
