"""One of two ranks, each with a simulated device: what every collective gives. test_collectives.py runs it."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import simulated_device
from simulated_device import native

simulated_device.register()


def main(rank: int, store: str, device: torch.device) -> None:
    dist.init_process_group("simccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    native().set_delays(rank, 500, 500)
    mine = torch.arange(4.0, device=device) + 10 * rank

    def late() -> torch.Tensor:
        """This rank's values, which are only there some time after the host goes on."""
        native().sleep_us(20_000)
        return mine + 0

    reduced = late()
    work = dist.all_reduce(reduced, async_op=True)
    assert work is not None
    assert not work.is_completed()  # the host goes on
    work.wait()  # the stream waits
    assert reduced.tolist() == [10.0, 12.0, 14.0, 16.0]

    gathered = torch.empty(8, device=device)
    dist.all_gather_single(gathered, late())
    assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]

    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, late())
    assert [each.tolist() for each in parts] == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]

    exchanged = torch.empty(4, device=device)
    dist.all_to_all_single(exchanged, late())
    assert exchanged.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]

    sent = late()
    dist.broadcast(sent, 1)
    assert sent.tolist() == [10.0, 11.0, 12.0, 13.0]

    received = torch.empty(4, device=device)
    both = [dist.P2POp(dist.isend, late(), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    assert received.tolist() == [10 * (1 - rank) + each for each in range(4)]

    on_the_host = torch.ones(2)
    dist.all_reduce(on_the_host)
    assert on_the_host.tolist() == [2.0, 2.0]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], torch.device("sim", int(sys.argv[1])))
