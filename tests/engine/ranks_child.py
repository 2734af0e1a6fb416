"""One of two ranks that meet four times; started twice by test_ranks.py. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from longshore.engine.ranks import Ranks, join


def total(ranks: Ranks) -> float:
    mine = torch.tensor([float(10**ranks.rank)])
    dist.all_reduce(mine, group=ranks.group)
    return mine.item()


def seen(ranks: Ranks) -> dict[str, Any]:
    result = {
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "local_rank": ranks.local_rank,
        "device": str(ranks.device),
        "owns_group": ranks.owns_group,
        "backend": dist.get_backend(ranks.group),
        "total": total(ranks),
    }
    ranks.close()
    result["left"] = dist.is_initialized()
    ranks.close()
    return result


def main(rank: int, store: str, environments: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    report: dict[str, Any] = {"joined": [seen(join(device="cpu", environ=environ)) for environ in environments]}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    report["adopted"] = seen(join(environ={"SLURM_LOCALID": "5", "RANK": "7"}, device="cpu"))
    try:
        join("nccl", "cpu")
    except ValueError as error:
        report["wrong backend"] = str(error)
    dist.destroy_process_group()
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
