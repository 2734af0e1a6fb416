"""A run that somebody may kill: it goes on from its last checkpoint, and saves after every step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support import whole

from checkpoint.resume_cases import Setting, make_engine, train
from longshore.errors import NoCheckpointError, RankError


class Run(NamedTuple):
    """What is trained. With Muon the weights do not depend on the number of ranks, which is 1 or 2."""

    folder: str
    stage: int
    async_save: bool
    steps: int
    optimizer: str = "AdamW"
    states: str = "fp32"


def _train_with_muon(engine: Any) -> None:
    """One step on both halves of a batch: two ranks have one each, and one rank accumulates them."""
    from engine import muon_cases  # for which torch has to have a Muon

    rank, world_size = dist.get_rank(), dist.get_world_size()
    muon_cases.train(engine, engine.global_steps, range(rank, 2, world_size))


def _engine_with_muon(stage: int) -> Any:
    from engine import muon_cases

    steps = 2 // dist.get_world_size()
    ahead = {"super_offload": True}
    return muon_cases.offloading(stage, torch.bfloat16, 0.0, ahead, gradient_accumulation_steps=steps)


@functools.lru_cache
def plain_muon(steps: int) -> str:
    """The digest of the weights of ``torch.optim.Muon`` and AdamW in a plain loop on the batches of both ranks."""
    from engine import muon_cases

    model = muon_cases.build().to(torch.bfloat16)
    plain = muon_cases.plain_of(model)
    for step in range(steps):
        plain.step(muon_cases.mean_gradients(model, step, 2))
    return _digest(model)


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    try:
        for parameter in model.parameters():
            digest.update(whole(parameter).detach().contiguous().view(torch.uint8).numpy().tobytes())
    except RuntimeError as error:
        raise RankError("another rank ended while torch put parameters together for this test") from error
    return digest.hexdigest()


def run(rank: int, world_size: int, store: str, about: Run, pipe: Connection) -> None:
    """Says ``("ready", step)``, ``("saving", step)`` and in the end a digest of the weights, or an error's name."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    try:
        muon = about.optimizer == "Muon"
        engine = _engine_with_muon(about.stage) if muon else make_engine(Setting(about.stage, states=about.states))
        torch.manual_seed(100 + rank)
        with contextlib.suppress(NoCheckpointError):  # none was completed before a kill
            engine.load_checkpoint(about.folder)
        pipe.send(("ready", engine.global_steps))
        while engine.global_steps < about.steps:
            _train_with_muon(engine) if muon else train(engine, 1)
            pipe.send(("saving", engine.global_steps))
            engine.save_checkpoint(about.folder, keep_last=2, async_save=about.async_save)
        engine.wait_for_checkpoint()
        pipe.send(("end", _digest(engine.module)))
        engine.destroy()
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])
        pipe.send(("error", f"{type(error).__name__}: {error}\n{where}"))
    os._exit(0)  # what is left of a group whose other rank was killed is nobody's business
