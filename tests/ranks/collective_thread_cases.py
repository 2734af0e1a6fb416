"""What ranks tell each other, run on every rank."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from longshore.errors import RankError
from longshore.layout.layout import Layout, division_of
from longshore.layout.tiles import Spec
from longshore.ranks import waiting as module_of_waits
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.meeting import Action
from longshore.ranks.twin_groups import Twins, timeout_of, twin_of, twins_of
from longshore.store import rounds as module
from longshore.store.agreement import Agreement, Statement, agreement_of
from longshore.store.ownership import ReplicatedOwnership, SharedOwnership
from longshore.store.rounds import reduce_shard
from ranks.gathering_cases import sharing

CPU = torch.device("cpu")


def make_thread() -> CollectiveThread:
    return CollectiveThread(twins_of(None, CPU), CPU, 1 << 20)


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduction(
    dtype: torch.dtype,
    used: list[list[int]],
    predivide: float,
    replicated: bool,
    slice_numel: int = 1 << 22,
    where: str = "shared",
) -> None:
    """Parameters of 5, 40 and 17 elements; ``used`` says which of them each rank has."""
    former, module.SLICE_NUMEL = module.SLICE_NUMEL, slice_numel
    try:
        with sharing(where):
            _reduction(dtype, used, predivide, replicated)
    finally:
        module.SLICE_NUMEL = former


def _reduction(dtype: torch.dtype, used: list[list[int]], predivide: float, replicated: bool) -> None:
    collectives = make_thread()
    numels = [5, 40, 17]
    specs = [Spec(index, numel, dtype) for index, numel in enumerate(numels)]
    division = division_of(0 if replicated else 2, collectives.world_size, collectives.rank)
    layout = Layout(division, 1000).extended(specs)
    (bucket,) = layout.buckets
    gradients = {
        index: values_of(10 * collectives.rank + index, numels[index], dtype) for index in used[collectives.rank]
    }
    ownership = ReplicatedOwnership(collectives, layout) if replicated else SharedOwnership(collectives, layout, 100)

    def reduce() -> list:
        reduced = reduce_shard(collectives, bucket, gradients, dtype, predivide)
        assert gradients == {}  # they were let go of
        return list(ownership.spread(bucket, reduced))

    arrivals = collectives.run(reduce)
    anywhere = set().union(*map(set, used))
    assert {owned.parameter for owned, _ in arrivals} == {
        owned.parameter for owned in bucket.owned if owned.parameter in anywhere
    }
    for owned, values in arrivals:
        total = torch.zeros(numels[owned.parameter])
        for rank in range(collectives.world_size):
            if owned.parameter in used[rank]:
                theirs = values_of(10 * rank + owned.parameter, numels[owned.parameter], dtype)
                total += theirs * (1.0 / predivide) if predivide != 1.0 else theirs
        expected = total * (predivide / collectives.world_size)
        assert values.dtype == torch.float32
        assert torch.equal(values, expected[owned.offset : owned.offset + owned.numel])
    collectives.close()


def meeting(actions: list[int], numbers: list[int], windows: list[int]) -> str:
    """What ``meet`` says when the ranks come with these."""
    collectives = make_thread()
    rank = collectives.rank
    try:
        collectives.run(lambda: collectives.meet(Action(actions[rank]), numbers[rank], windows[rank]))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        collectives.close()


def met_again() -> list[str]:
    """Rank 0 gave up its window and is at the next backward; rank 1 is in step(), and then there as well."""
    collectives = make_thread()
    said = []
    if collectives.rank == 0:
        collectives.give_up()
        collectives.run(lambda: collectives.meet(Action.BACKWARD, 1, 1))
    else:
        try:
            collectives.run(lambda: collectives.meet(Action.STEP, 5, 0))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        collectives.run(lambda: collectives.meet(Action.BACKWARD, 1, 1))
    try:  # told once is enough
        collectives.run(lambda: collectives.meet(Action.STEP if collectives.rank == 0 else Action.READ, 5, 1))
    except Exception as error:
        said.append(f"{type(error).__name__}: {str(error).partition(';')[0]}")
    collectives.close()
    return said


def closing() -> list[object]:
    """Rank 0 is in its last backward, rank 1 in step(): what each ``meet`` returned. Then both are at both."""
    collectives = make_thread()
    found: list[object] = []
    actions = [Action.CLOSE, Action.STEP] if collectives.rank == 0 else [Action.STEP]
    for action in [*actions, Action.CLOSE, Action.STEP]:
        found.append(collectives.run(lambda action=action: collectives.meet(action, 1, 0)))
    collectives.close()
    return found


def agreed_on(collectives: CollectiveThread, mine: Statement) -> Agreement:
    rows = collectives.tell(Action.STEP, 0, 0, mine.numbers())
    assert rows is not None
    return agreement_of(rows, mine)


def agreeing() -> object:
    """Rank 0: two deferred rounds, the second a sum; rank 1: one, a sum, and a failure."""
    collectives = make_thread()
    mine = (
        Statement([False, True], False, 3, [1, 0], [True, False, False])
        if collectives.rank == 0
        else Statement([True], True, 2, [0, 1], [False, False, True])
    )
    agreed = collectives.run(lambda: agreed_on(collectives, mine))
    collectives.close()
    return (agreed.deferred, agreed.failed, agreed.backwards, agreed.order, agreed.used)


def many_deferred() -> list[bool]:
    collectives = make_thread()
    agreed = collectives.run(lambda: agreed_on(collectives, Statement([False] * 70)))
    collectives.close()
    return list(agreed.deferred)


def gathering(chunk_numel: int, numels: list[int], where: str) -> None:
    """Each rank knows its own shard; afterwards all know everything."""
    with sharing(where):
        _gathering(chunk_numel, numels)


def _gathering(chunk_numel: int, numels: list[int]) -> None:
    collectives = make_thread()
    specs = [Spec(index, numel, torch.bfloat16) for index, numel in enumerate(numels)]
    layout = Layout(division_of(2, collectives.world_size, collectives.rank), 10_000).extended(specs)
    (bucket,) = layout.buckets
    whole = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16() for numel in numels]
    ownership = SharedOwnership(collectives, layout, chunk_numel)
    targets = {index: torch.full_like(values, float("nan")) for index, values in enumerate(whole)}
    for owned in bucket.owned:
        part = slice(owned.offset, owned.offset + owned.numel)
        targets[owned.parameter][part] = whole[owned.parameter][part]
    idle = targets.pop(0)
    before = idle.clone()
    collectives.run(lambda: ownership.publish(bucket, targets))
    for index, target in targets.items():
        assert torch.equal(target, whole[index])
    assert torch.equal(idle.view(torch.int16), before.view(torch.int16))  # idle means untouched
    collectives.close()


def rank_that_ends(rank_to_end: int) -> str:
    """One rank dies; the other is told within seconds, and nothing runs on its thread any more."""
    group = dist.group.WORLD  # which is connected: the death comes later
    collectives = CollectiveThread(Twins(group, group), CPU, 1 << 20)
    if collectives.rank == rank_to_end:
        import os

        os._exit(1)
    try:
        for number in range(100):
            collectives.run(lambda number=number: collectives.meet(Action.BACKWARD, number, 0))
        raise AssertionError("nothing was noticed")
    except RankError as error:
        said = str(error)
    ran: list[int] = []
    collectives.submit(lambda: ran.append(1))
    with contextlib.suppress(RankError):
        collectives.drain()
    assert ran == []
    return said


def twins(timeout_s: float) -> tuple[float, float]:
    """How long a group of the user's waits, and its twin."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    twin = twin_of(group, CPU)
    found = [timeout_of(each, CPU) for each in (group, twin)]
    dist.destroy_process_group(twin)
    dist.destroy_process_group(group)
    return tuple(0.0 if each is None else each.total_seconds() for each in found)


def twins_in_turn(late_s: float) -> float:
    """Seconds that making a twin takes; rank 0 has its own, of the same ranks, that much later."""
    make = dist.new_group

    def late(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        time.sleep(late_s)
        return made

    with mock.patch.object(dist, "new_group", late if dist.get_rank() == 0 else make):
        begun = time.monotonic()
        twin = twin_of(None, CPU)
        took_s = time.monotonic() - begun
    dist.destroy_process_group(twin)
    return took_s


class _Listener(logging.Handler):
    """Keeps what is logged, and calls back at the first record."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.said: list[str] = []
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if len(self.said) == 1:
            self._then()


def waiting(late: bool) -> list[str]:
    """What rank 0 logs when the ranks meet twice; with ``late`` rank 1 comes to the second only after it did so."""
    collectives = make_thread()
    listener = _Listener(lambda: dist.send(torch.zeros(1), 1))
    logger, former = logging.getLogger("longshore"), module_of_waits._NOTICE_S
    logger.addHandler(listener)
    try:
        collectives.run(lambda: collectives.meet(Action.BACKWARD, 2, 5))
        if late:
            module_of_waits._NOTICE_S = 0.05
            if collectives.rank == 1:
                dist.recv(torch.zeros(1), 0)
                module_of_waits._NOTICE_S = former
                time.sleep(0.5)  # in which rank 0 could say it again
        collectives.run(lambda: collectives.meet(Action.STEP, 7, 5))
        collectives.close()
        return listener.said
    finally:
        module_of_waits._NOTICE_S = former
        logger.removeHandler(listener)
