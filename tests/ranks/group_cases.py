"""Process groups that are used again after the engine that had them; run on every rank."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import cases
from engine.resting_cases import Run

from longshore.ranks import twin_groups
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.twin_groups import Twins, _again, _Kind, twins_of


def kind(*ranks: int, name: str = "some device") -> _Kind:
    return _Kind(ranks or tuple(range(dist.get_world_size())), timedelta(seconds=9), name)


def offered(*names_of_kinds: str) -> list[str | None]:
    """Two idle groups, which the ranks have in different orders; the second rank lacks one of the first kind.
    Returns which group is found for each kind, by its place among the new ones."""
    rank = dist.get_rank()
    made = [dist.new_group() for _ in range(4)]
    twin_groups._idle.clear()
    twin_groups._idle[kind(name="a")] = [made[1], made[0]] if rank == 0 else [made[0]]
    twin_groups._idle[kind(name="b")] = [made[2], made[3]][:: 1 - 2 * rank]
    found = [_again(kind(name=name), made[3]) for name in names_of_kinds]
    places: list[Any] = [None if each is None else made.index(each) for each in found]
    twin_groups._idle.clear()
    for group in made:
        dist.destroy_process_group(group)
    return places


def after_another_default_group(folder: str) -> tuple[Any, Any]:
    """What is found before and after the default group was destroyed and made again, with the harness's in between."""
    twin_groups._idle.clear()
    group = dist.new_group()
    twin_groups._idle[kind()] = [group]
    found = _again(kind(), None)
    twin_groups._idle[kind()] = [group]
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'again'}", rank=rank, world_size=size)
    later = _again(kind(), None)
    assert twin_groups._idle.pop(kind()) == []
    return found is group, later


def parts() -> list[Any]:
    """Three ranks, of which the first two are one part and the last another; only the first part has idle groups."""
    twin_groups._idle.clear()
    both, alone = dist.new_group([0, 1]), dist.new_group([2])
    rank = dist.get_rank()
    mine, group = (kind(0, 1), both) if rank < 2 else (kind(2), alone)
    twin_groups._idle[mine] = [group] if rank < 2 else []
    found: list[Any] = [_again(mine, None)]  # all parts make new ones, as one of them has to
    twin_groups._idle[mine] = [group]
    found.append(_again(mine, None) is group)
    twin_groups._idle.clear()
    for each in (both, alone):
        with contextlib.suppress(ValueError):  # not a member
            dist.destroy_process_group(each)
    return found


# -- on an accelerator --------------------------------------------------------


def _device() -> torch.device:
    return cases._device("device", dist.get_rank())


def _thread() -> tuple[CollectiveThread, str]:
    twins = twins_of(None, _device())
    return CollectiveThread(twins, _device(), 1 << 20), twins.data.group_name


def engines(count: int) -> tuple[int, int]:
    """So many engines, one after the other, each of which is plain PyTorch's for a step; returns by how many process
    groups there are more after the second and after the last."""
    found = []
    for number in range(count):
        run = Run("device", "bf16")
        run.step(0)
        run.engine.destroy()
        if number in (1, count - 1):
            found.append(len(dist.distributed_c10d._world.pg_map))
    return found[0], found[1]


def in_turn() -> dict[str, list[str]]:
    """Names of the groups for tensors of threads that are open at once, of later ones, and after a job has failed."""
    twin_groups._idle.clear()
    (one, first), (two, second) = _thread(), _thread()
    one.close()
    two.close()
    (one, third), (two, fourth) = _thread(), _thread()
    found = {"at once": [first, second], "again": [third, fourth]}
    one.close()

    def fails() -> None:
        raise ArithmeticError

    if dist.get_rank() == 1:  # the other rank knows nothing of it
        two.submit(fails)
        with contextlib.suppress(ArithmeticError):
            two.drain()
    two.close()
    (one, fifth), (two, sixth) = _thread(), _thread()
    found["after a failure"] = [fifth, sixth]
    sums = [_sum(each) for each in (one, two)]
    assert sums == [float(sum(range(dist.get_world_size())))] * 2
    one.close()
    two.close()
    return found


def _sum(thread: CollectiveThread) -> float:
    assert isinstance(thread.groups, Twins)
    value = torch.full((3,), float(dist.get_rank()), device=_device())
    dist.all_reduce(value, group=thread.groups.data)
    return value[0].item()
