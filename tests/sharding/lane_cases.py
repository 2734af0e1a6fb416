"""What ranks tell each other, run on every rank."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from longshore.errors import RankError
from longshore.sharding import lane as lane_module
from longshore.sharding import reduction as module
from longshore.sharding.action import Action
from longshore.sharding.agreement import Statement, agree_on
from longshore.sharding.bucket import plan_buckets
from longshore.sharding.groups import timeout_of, twin_of
from longshore.sharding.lane import CollectiveLane
from longshore.sharding.ownership import Replicated, Sharded
from longshore.sharding.reduction import Averaging, reduce_shard
from sharding.gathering_cases import sharing

CPU = torch.device("cpu")


def make_lane() -> CollectiveLane:
    return CollectiveLane(None, CPU, 1 << 20)


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
    lane = make_lane()
    numels = [5, 40, 17]
    (bucket,) = plan_buckets([(index, numel, dtype) for index, numel in enumerate(numels)], 1000, lane.world_size)
    gradients = {index: values_of(10 * lane.rank + index, numels[index], dtype) for index in used[lane.rank]}
    averaging = Averaging.over(lane.world_size, predivide)
    ownership = Replicated(lane) if replicated else Sharded(lane, 100)

    def reduce() -> list:
        reduced = reduce_shard(lane, bucket, gradients, dtype, averaging)
        assert gradients == {}  # they were let go of
        return list(ownership.arrivals(bucket, reduced))

    arrivals = lane.run(reduce)
    anywhere = set().union(*map(set, used))
    assert {piece.parameter for piece, _ in arrivals} == {
        piece.parameter for piece in ownership.owned(bucket) if piece.parameter in anywhere
    }
    for piece, values in arrivals:
        total = torch.zeros(numels[piece.parameter])
        for rank in range(lane.world_size):
            if piece.parameter in used[rank]:
                theirs = values_of(10 * rank + piece.parameter, numels[piece.parameter], dtype)
                total += theirs * (1.0 / predivide) if predivide != 1.0 else theirs
        expected = total * (predivide / lane.world_size)
        assert values.dtype == torch.float32
        assert torch.equal(values, expected[piece.parameter_offset : piece.parameter_offset + piece.numel])
    lane.close()


def meeting(actions: list[int], numbers: list[int], windows: list[int]) -> str:
    """What ``meet`` says when the ranks come with these."""
    lane = make_lane()
    rank = lane.rank
    try:
        lane.run(lambda: lane.meet(Action(actions[rank]), numbers[rank], windows[rank]))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        lane.close()


def met_again() -> list[str]:
    """Rank 0 gave up its window and is at the next backward; rank 1 is in step(), and then there as well."""
    lane = make_lane()
    said = []
    if lane.rank == 0:
        lane.give_up_window()
        lane.run(lambda: lane.meet(Action.BACKWARD, 1, 1))
    else:
        try:
            lane.run(lambda: lane.meet(Action.STEP, 5, 0))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        lane.run(lambda: lane.meet(Action.BACKWARD, 1, 1))
    try:  # told once is enough
        lane.run(lambda: lane.meet(Action.STEP if lane.rank == 0 else Action.READ, 5, 1))
    except Exception as error:
        said.append(f"{type(error).__name__}: {str(error).partition(';')[0]}")
    lane.close()
    return said


def closing() -> list[object]:
    """Rank 0 is in its last backward, rank 1 in step(): what each ``meet`` returned. Then both are at both."""
    lane = make_lane()
    found: list[object] = []
    actions = [Action.CLOSE, Action.STEP] if lane.rank == 0 else [Action.STEP]
    for action in [*actions, Action.CLOSE, Action.STEP]:
        found.append(lane.run(lambda action=action: lane.meet(action, 1, 0)))
    lane.close()
    return found


def agreeing() -> object:
    """Rank 0: two deferred rounds, the second a sum; rank 1: one, a sum, and a failure."""
    lane = make_lane()
    mine = (
        Statement([False, True], False, 3, [1, 0], [True, False, False])
        if lane.rank == 0
        else Statement([True], True, 2, [0, 1], [False, False, True])
    )
    agreed = lane.run(lambda: agree_on(lane, mine))
    lane.close()
    return (agreed.deferred, agreed.failed, agreed.backwards, agreed.order, agreed.used)


def many_deferred() -> list[bool]:
    lane = make_lane()
    agreed = lane.run(lambda: agree_on(lane, Statement([False] * 70)))
    lane.close()
    return list(agreed.deferred)


def gathering(chunk_numel: int, numels: list[int], where: str) -> None:
    """Each rank knows its own shard; afterwards all know everything."""
    with sharing(where):
        _gathering(chunk_numel, numels)


def _gathering(chunk_numel: int, numels: list[int]) -> None:
    lane = make_lane()
    (bucket,) = plan_buckets([(index, numel, "a") for index, numel in enumerate(numels)], 10_000, lane.world_size)
    whole = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16() for numel in numels]
    ownership = Sharded(lane, chunk_numel)
    targets = {index: torch.full_like(values, float("nan")) for index, values in enumerate(whole)}
    for piece in ownership.owned(bucket):
        part = slice(piece.parameter_offset, piece.parameter_offset + piece.numel)
        targets[piece.parameter][part] = whole[piece.parameter][part]
    idle = targets.pop(0)
    before = idle.clone()
    lane.run(lambda: ownership.publish(bucket, targets))
    for index, target in targets.items():
        assert torch.equal(target, whole[index])
    assert torch.equal(idle.view(torch.int16), before.view(torch.int16))  # idle means untouched
    lane.close()


def rank_that_ends(rank_to_end: int) -> str:
    """One rank dies; the other is told within seconds, and nothing runs on its lane any more."""
    lane = make_lane()
    if lane.rank == rank_to_end:
        import os

        os._exit(1)
    try:
        for number in range(100):
            lane.run(lambda number=number: lane.meet(Action.BACKWARD, number, 0))
        raise AssertionError("nothing was noticed")
    except RankError as error:
        said = str(error)
    ran: list[int] = []
    lane.submit(lambda: ran.append(1))
    with contextlib.suppress(RankError):
        lane.drain()
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
    lane = CollectiveLane(twin_of(None, CPU), CPU, 1 << 20, owns_group=True)
    listener = _Listener(lambda: dist.send(torch.zeros(1), 1))
    logger, former = logging.getLogger("longshore"), lane_module._NOTICE_S
    logger.addHandler(listener)
    try:
        lane.run(lambda: lane.meet(Action.BACKWARD, 2, 5))
        if late:
            lane_module._NOTICE_S = 0.05
            if lane.rank == 1:
                dist.recv(torch.zeros(1), 0)
                lane_module._NOTICE_S = former
                time.sleep(0.5)  # in which rank 0 could say it again
        lane.run(lambda: lane.meet(Action.STEP, 7, 5))
        lane.close()
        return listener.said
    finally:
        lane_module._NOTICE_S = former
        logger.removeHandler(listener)
