"""One contestant in a process of its own: ``python -m benchmarks.gpu.one_run JOB RUN_JSON RESULT_PATH``.

Whatever becomes of it is a result: what it measured, or why there is nothing.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.floor import NotAvailable
from benchmarks.gpu.contestants import BY_HAND, Training, Way, prepare, start
from benchmarks.llama import LlamaSize, make_llama
from benchmarks.memory import PeakResident, available_bytes, load_torch_optimizers

_WARMUP_STEPS = 20
"""The preparation's learning rate grows to the full one over so many steps."""


@dataclass(frozen=True)
class Run:
    """What one process does.

    Attributes:
        contestant: one of ``CONTESTANTS``.
        size: of the Llama, and its sequences.
        device: ``cuda`` or ``cpu``.
        threads: of the host.
        learning_rate: throughout.
        backwards: sequences to a step.
        warmups: steps ahead of the clock.
        steps: steps on the clock.
        first_row: of the text, where training begins.
        text_path: int64 ``[rows, tokens]``, by ``torch.save``.
        weights_path: where training begins from, or what the preparation writes; None: random weights.
        deterministic: with torch's deterministic algorithms, and a digest of the weights at the end.
    """

    contestant: str
    size: LlamaSize
    device: str
    threads: int
    learning_rate: float
    backwards: int
    warmups: int
    steps: int
    first_row: int
    text_path: str
    weights_path: str | None
    deterministic: bool = False


def prepare_weights(run: Run) -> dict[str, Any]:
    """Train from nothing by the hand-written loop, without offload, and save the weights.

    Gradients of fresh weights are clipped at every step; those of a model that
    is being fine-tuned seldom are.
    """
    model = _checkpointed(run)
    text = torch.load(run.text_path)[run.first_row :].to(run.device)
    training = start(BY_HAND, model, _way(run))
    norms = []
    for number in range(run.steps):
        for group in training.optimizer.param_groups:
            group["lr"] = run.learning_rate * min(1.0, (number + 1) / _WARMUP_STEPS)
        training.step(text[number * run.backwards :][: run.backwards])
        norms.append(training.grad_norm())
    assert run.weights_path is not None
    torch.save(model.state_dict(), run.weights_path)
    return {"parameters": _numel(model), "grad_norms": norms}


def train(run: Run) -> dict[str, Any]:
    """Times, losses, norms and memory of one contestant.

    Raises:
        NotAvailable: a package is missing.
    """
    if run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(run.threads)
    prepare(run.contestant, _way(run))
    load_torch_optimizers()
    model = _checkpointed(run)
    if run.weights_path is not None:
        model.load_state_dict(torch.load(run.weights_path, map_location=run.device, mmap=True))
    text = torch.load(run.text_path)[run.first_row :].to(run.device)
    resident, available = PeakResident(), available_bytes()
    training = start(run.contestant, model, _way(run))
    on_cuda = run.device == "cuda"
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, norms, least = [], [], [], available
    for number in range(run.warmups + run.steps):
        batch = text[number * run.backwards :][: run.backwards]
        took, loss = _timed_step(training, batch, on_cuda)
        seconds.append(took)
        losses.append(loss)
        norms.append(training.grad_norm())
        least = min(least, available_bytes())
        resident.look()
    result: dict[str, Any] = {
        "parameters": _numel(model),
        "steps_s": seconds[run.warmups :],
        "losses": losses,
        "grad_norms": norms,
        "host_grown_bytes": resident.grown_bytes,
        "host_taken_from_machine_bytes": available - least,
        "host_counted_bytes": training.host_bytes(),
        "stepped_ahead": training.ahead(),
    }
    if on_cuda:
        result["device_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if run.deterministic:
        result["weights_sha256"] = _digest(model)
    return result


def _way(run: Run) -> Way:
    return Way(run.device, run.backwards, run.learning_rate, run.threads)


def _checkpointed(run: Run) -> nn.Module:
    """The Llama with activation checkpointing; raises NotAvailable without transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise NotAvailable("transformers is not installed: pip install transformers")
    model: Any = make_llama(run.size, run.device).train()
    # Its name from transformers 5 on, which warns of the old one; 4 knows only that.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def _timed_step(training: Training, batch: torch.Tensor, on_cuda: bool) -> tuple[float, float]:
    """Wall clock in seconds, from an idle device to an idle device, and the loss."""
    if on_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = training.step(batch)
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, loss.item()


def _numel(model: nn.Module) -> int:
    """With ZeRO-3 too, which leaves parameters empty."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def _digest(model: nn.Module) -> str:
    """Equal for the same bits in all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


JOBS: dict[str, Callable[[Run], dict[str, Any]]] = {"prepare": prepare_weights, "train": train}


def attempt(job: str, run: Run) -> dict[str, Any]:
    """What the job gives, or ``{"failed": why}``."""
    try:
        return JOBS[job](run)
    except NotAvailable as reason:
        return {"failed": str(reason)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"failed": f"out of memory: {_first_line(error)}"}
    except Exception as error:  # other packages raise what they like
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


if __name__ == "__main__":
    values = json.loads(sys.argv[2])
    outcome = attempt(sys.argv[1], Run(**{**values, "size": LlamaSize(**values["size"])}))
    Path(sys.argv[3]).write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # what libraries do at exit may wait for workers that are gone
