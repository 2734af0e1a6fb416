"""A run that somebody may kill: it goes on from its last checkpoint, and saves after every step."""

from __future__ import annotations

import hashlib
import os
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from support import whole

from checkpoint.resume_cases import Setting, make_engine, train


def run(rank: int, world_size: int, store: str, folder: str, stage: int, steps: int, pipe: Connection) -> None:
    """Says ``("ready", step)``, ``("saving", step)`` and in the end a digest of the weights, or an error's name."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    try:
        engine = make_engine(Setting(stage))
        torch.manual_seed(100 + rank)
        engine.load_checkpoint(folder)
        pipe.send(("ready", engine.global_steps))
        while engine.global_steps < steps:
            train(engine, 1)
            pipe.send(("saving", engine.global_steps))
            engine.save_checkpoint(folder, keep_last=2)
        digest = hashlib.sha256()
        for parameter in engine.module.parameters():
            digest.update(whole(parameter).detach().contiguous().view(torch.uint8).numpy().tobytes())
        pipe.send(("end", digest.hexdigest()))
        engine.destroy()
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(0)  # what is left of a group whose other rank was killed is nobody's business
