"""One rank of a team: ``python -m benchmarks.rank JOB SETUP_JSON CONTESTANTS_JSON``, started by ``benchmarks.team``.

It builds its contestants and then answers: one line in, a number of rounds;
one line out, JSON. In between it blocks, so that another team can have the
machine.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor

from benchmarks.contestants import FORWARD_BACKWARD, SIMULATED, Setup, Training, prepare, start
from benchmarks.floor import NotAvailable
from benchmarks.memory import Peak, allocated_bytes, load_torch_optimizers, resident_bytes
from benchmarks.timing import Case, interleave

Answer = Callable[[int], Any]
MEMORY_STEPS = 3


def time_steps(setup: Setup, contestants: Sequence[str]) -> Answer:
    """Seconds of each step of each contestant, in turn."""
    cases = {name: Case(start(name, setup, setup.llama()).run) for name in contestants}
    return lambda rounds: interleave(cases, rounds, lambda _: None, warmups=0)


def watch_memory(setup: Setup, contestants: Sequence[str]) -> Answer:
    """What one contestant's state takes; on the simulated device also what gradients take there during backward."""
    (name,) = contestants
    prepare(name)
    allocated_bytes()  # can it be counted?
    load_torch_optimizers()
    model = setup.llama()
    numel = sum(parameter.numel() for parameter in model.parameters())  # DeepSpeed will leave them empty

    def measure(rounds: int) -> dict[str, Any]:
        hooks = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in model.parameters()]
        alone_bytes = _backward_bytes(start(FORWARD_BACKWARD, setup, model), rounds)
        for hook in hooks:
            hook.remove()
        before = resident_bytes()
        training = start(name, setup, model)
        for _ in range(MEMORY_STEPS):
            training.run()
        result: dict[str, Any] = {
            "parameters": numel,
            "resident_growth_bytes": resident_bytes() - before,
        }
        if name == SIMULATED:
            result |= _counted(training)
            result["gradients_bytes"] = _backward_bytes(training, rounds) - alone_bytes
        return result

    return measure


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _backward_bytes(training: Training, rounds: int) -> int:
    """The most that forward and backward allocate, once they have run."""
    training.run()
    most = 0
    for _ in range(rounds):
        with Peak() as peak:
            training.backward()
        most = max(most, peak.grown_bytes)
        training.finish()
    return most


def _counted(training: Training) -> dict[str, Any]:
    explained = training.engine.explain(print_it=False)
    owned = sum(
        numel for parameter in explained.parameters for rank, numel in parameter.owners if rank == explained.rank
    )
    return {"owned": owned, "counted_bytes": explained.host_bytes}


JOBS: dict[str, Callable[[Setup, Sequence[str]], Answer]] = {"time": time_steps, "memory": watch_memory}


def serve(answers: TextIO, job: str, setup: str, contestants: str) -> None:
    settings = Setup(**json.loads(setup))
    torch.set_num_threads(settings.threads)

    def send(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        answer = JOBS[job](settings, json.loads(contestants))
        gc.collect()
        gc.freeze()  # collecting before each step is then short, and as long on all ranks
        send({})
        for line in sys.stdin:
            send(answer(int(line)))
    except NotAvailable as reason:
        send({"missing": str(reason)})


if __name__ == "__main__":
    # Only answers go where they are read; whatever else is printed, and DeepSpeed prints, goes to standard error.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(stdout, *sys.argv[1:])
    stdout.close()
    os._exit(0)  # what libraries do at exit may wait for ranks that are gone
