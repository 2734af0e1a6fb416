"""Parameters gathered through shared memory or sockets, run on every rank."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from longshore.errors import GradientError
from longshore.ranks import data_plane as module
from longshore.ranks import waiting as module_of_waits
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.meeting import Epoch
from longshore.ranks.twin_groups import twins_of

CPU = torch.device("cpu")


@contextlib.contextmanager
def sharing(where: str) -> Iterator[None]:
    """``where``: "shared" memory, "sockets" (there is none), or "until full" (rank 1 has room for one)."""
    folder, fallocate = module._FOLDER, module.os.posix_fallocate
    calls = 0

    def until_full(descriptor: int, start: int, count: int) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls > 2:  # the first is to see whether there is any
            raise OSError("no space on purpose")
        fallocate(descriptor, start, count)

    if where == "sockets":
        module._FOLDER = Path("/nowhere")
    if where == "until full":
        module.os.posix_fallocate = until_full
    try:
        yield
    finally:
        module._FOLDER, module.os.posix_fallocate = folder, fallocate


def interrupted() -> list[str]:
    """Rank 0 gave up and gathers a module for its next forward, rank 1 the same one for what rank 0 gave up."""
    from longshore.stage3.fsdp import CopiesOfShards
    from longshore.stage3.fully_sharded import GatherMeetings, ModuleGather

    rank, said = dist.get_rank(), []
    gathering = GatherMeetings(None, CPU, ["a"], Epoch())

    def gather() -> None:
        gather = ModuleGather(gathering, 0, CopiesOfShards())
        output = gather.allocate((10,), dtype=torch.float32, device=CPU)
        output.view(2, -1)[rank].fill_(rank)
        gather(output, output.view(2, -1)[rank], dist.group.WORLD).wait()
        assert output.tolist() == [0.0] * 5 + [1.0] * 5

    try:
        gather()
        if rank == 0:
            gathering.interrupted()
        else:
            try:
                gather()
            except GradientError as error:
                said.append(str(error))
            gathering.interrupted()
        gather()
        gather()
        return said
    finally:
        gathering.close()


def waiting() -> list[str]:
    """What rank 0 logs while rank 1 gathers nothing for a while."""
    from longshore.stage3.fsdp import CopiesOfShards
    from longshore.stage3.fully_sharded import GatherMeetings, ModuleGather

    rank = dist.get_rank()
    collectives = CollectiveThread(twins_of(None, CPU), CPU, 1 << 20)
    gathering = GatherMeetings(None, CPU, ["a", "b"], Epoch())
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger, former = logging.getLogger("longshore"), module_of_waits._NOTICE_S
    logger.addHandler(handler)
    module_of_waits._NOTICE_S = 0.2 if rank == 0 else 30.0
    try:
        for number in range(2):
            if number == 1 and rank == 1:
                time.sleep(3.0)
            gather = ModuleGather(gathering, number, CopiesOfShards())
            output = gather.allocate((10,), dtype=torch.float32, device=CPU)
            gather(output, output.view(2, -1)[rank], dist.group.WORLD).wait()
        return said
    finally:
        module_of_waits._NOTICE_S = former
        logger.removeHandler(handler)
        gathering.close()
        collectives.close()


def gathered(seed: int, where: str, keep: int, fails: float = 0.0) -> dict[str, int]:
    """Gathers of random sizes, waited for and read ``keep`` gathers later, on ranks that are late at random.

    ``fails``: how often rank 1 took memory, and then did something else.
    """
    with sharing(where):
        return _gathered(seed, where, keep, fails)


def _gathered(seed: int, where: str, keep: int, fails: float) -> dict[str, int]:
    from longshore.stage3.fsdp import CopiesOfShards
    from longshore.stage3.fully_sharded import GatherMeetings, ModuleGather

    rank, world_size = dist.get_rank(), dist.get_world_size()
    collectives = CollectiveThread(twins_of(None, CPU), CPU, 1 << 20)
    gathering = GatherMeetings(None, CPU, ["a", "b"], Epoch())
    sizes, late = random.Random(seed), random.Random(seed + 1 + rank)
    held: list[tuple[torch.Tensor, dist.Work, int]] = []
    shared = 0

    def check(output: torch.Tensor, work: dist.Work, number: int) -> None:
        work.wait()
        for other, row in enumerate(output.view(world_size, -1)):
            assert bool((row == 1000 * other + number).all()), (number, other)

    try:
        assert gathering.shared.works == (where != "sockets")
        for number in range(60):
            count = sizes.choice([1, 7, 1000, 30_000]) * world_size
            gather = ModuleGather(gathering, number % 2, CopiesOfShards())
            output = gather.allocate((count,), dtype=torch.int32, device=CPU)
            shared += gather._block is not None
            mine = output.view(world_size, -1)[rank]
            mine.fill_(1000 * rank + number)
            time.sleep(late.choice([0, 0, 0.002]))
            work = gather(output, mine, dist.group.WORLD)
            assert work is not None
            held.append((output, work, number))
            time.sleep(late.choice([0, 0, 0.002]))
            if len(held) > keep:
                check(*held.pop(0))
            if rank == 1 and late.random() < fails:
                gathering.shared.lend(late.choice([100, 200_000]), held=True)  # and fails before it comes to a meeting
        for entry in held:
            check(*entry)
        return {
            "shared": shared,
            "blocks": len(gathering.shared._blocks),
            "names": sum(block.remove_file.alive for block in gathering.shared._blocks),
        }
    finally:
        gathering.close()
        collectives.close()


def exchanged(seed: int, where: str) -> int:
    """Exchanges and gathers of random sizes, on ranks that are late at random; returns how many were shared."""
    with sharing(where):
        collectives = CollectiveThread(twins_of(None, CPU), CPU, 1 << 20)
        try:
            return collectives.run(lambda: _exchanged(collectives, seed))
        finally:
            collectives.close()


def _exchanged(collectives: CollectiveThread, seed: int) -> int:
    sizes, late = random.Random(seed), random.Random(seed + 1 + collectives.rank)
    shared = 0
    for number in range(60):
        count, exchange = sizes.choice([64, 1024, 100_032]), sizes.random() < 0.5
        outgoing = collectives.data.outgoing(count * (collectives.world_size if exchange else 1))
        shared += outgoing.block is not None
        chunks = outgoing.memory.view(-1, count)
        for place, chunk in enumerate(chunks):
            chunk.fill_(50 * collectives.rank + 10 * place + number % 10)
        time.sleep(late.choice([0, 0, 0.002]))
        found = collectives.data.exchange(outgoing) if exchange else collectives.data.gather(outgoing)
        time.sleep(late.choice([0, 0, 0.002]))
        for rank, chunk in enumerate(found):
            expected = 50 * rank + 10 * (collectives.rank if exchange else 0) + number % 10
            assert chunk.shape == (count,) and bool((chunk == expected).all()), (number, rank)
    held = [] if collectives.data._shared is None else collectives.data._shared._blocks
    assert sum(block.capacity for block in held) <= 3 * collectives.world_size**2 * (100_032 + (1 << 16))
    return shared
