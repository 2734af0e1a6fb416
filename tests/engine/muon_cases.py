"""Muon under an engine of several ranks, beside a plain loop on the mean of the ranks' gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from plain_muon import Model, PlainMuon, backward, build, groups_of
from support import whole
from torch import Tensor, nn

import longshore
from longshore import utils
from longshore.tiles.events import TRANSFORM

LR = 0.02


def configuration(stage: int, **content: Any) -> dict[str, Any]:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 3000}
    return {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.0, "zero_optimization": zero, **content}


def started(stage: int, dtype: torch.dtype, model: Model | None = None, **content: Any) -> Any:
    if dtype != torch.float32:
        content["bf16"] = {"enabled": True, "check_grad_overflow": False}
    model = model or build()
    optimizer = longshore.Muon(groups_of(model), lr=LR)
    engine, *_ = longshore.initialize(model=model, optimizer=optimizer, config=configuration(stage, **content))
    return engine


def plain_of(model: Model) -> PlainMuon:
    groups = groups_of(model)
    groups[-1] |= {"betas": (0.9, 0.999), "eps": 1e-8}
    return PlainMuon(groups, lr=LR)


def mean_gradients(model: nn.Module, step: int, size: int | None = None) -> dict[nn.Parameter, Tensor | None]:
    """Of ``size`` ranks (all), computed where they compute, and added in their order in float32."""
    size = size or (dist.get_world_size() if dist.is_initialized() else 1)
    there = copy.deepcopy(model).to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    sums: dict[nn.Parameter, Tensor | None] = dict.fromkeys(model.parameters())
    for rank in range(size):
        backward(there, 100 * step + rank)
        for parameter, computed in zip(model.parameters(), there.parameters(), strict=True):
            assert computed.grad is not None
            former, gradient = sums[parameter], computed.grad.float().cpu()
            sums[parameter] = gradient if former is None else former + gradient
            computed.grad = None
    return {parameter: None if total is None else total * (1 / size) for parameter, total in sums.items()}


def train(engine: Any, step: int, parts: Sequence[int] | None = None) -> None:
    """One step on these parts of a batch, each a backward of the window; by default on the one of this rank."""
    if parts is None:
        parts = [dist.get_rank() if dist.is_initialized() else 0]
    for part in parts:
        generator = torch.Generator().manual_seed(100 * step + part)
        tokens = torch.randint(0, 11, (5, 7), generator=generator)
        engine.backward(engine(tokens.to(engine.device)).float().square().sum())
        engine.step()


def equal(engine: Any, plain_model: nn.Module) -> list[str]:
    """The names of the parameters that differ."""
    pairs = zip(engine.module.named_parameters(), plain_model.parameters(), strict=True)
    return [name for (name, ours), theirs in pairs if not torch.equal(whole(ours).cpu(), theirs)]


def run(
    stage: int, dtype: torch.dtype, clipping: float = 0.0, steps: int = 4, offload: dict[str, Any] | None = None
) -> list[list[str]]:
    """The names of the parameters that differ after each step; ``offload``: the section of a configuration."""
    plain_model = build().to(dtype)
    engine = offloading(stage, dtype, clipping, offload or {})
    return beside(engine, plain_of(plain_model), plain_model, range(steps), clipping)


def offloading(stage: int, dtype: torch.dtype, clipping: float, offload: dict[str, Any], **content: Any) -> Any:
    zero = configuration(stage)["zero_optimization"]
    zero["offload_optimizer"] |= offload
    return started(stage, dtype, gradient_clipping=clipping, zero_optimization=zero, **content)


def ahead(stage: int, dtype: torch.dtype, clipping: float) -> tuple[list[list[str]], list[tuple[int, int, int]]]:
    """The names of the parameters that differ after each step, and how many of this rank's tiles of matrices were begun
    ahead, kept and redone in it."""
    plain_model = build().to(dtype)
    engine = offloading(stage, dtype, clipping, {"super_offload": True})
    found, counts = [], []
    for differing in stepped(engine, plain_of(plain_model), plain_model, range(4), clipping):
        found.append(differing)
        record = engine.optimizer.speculation
        counts.append((record.begun, record.kept, record.redone))
    engine.destroy()
    return found, counts


def beside(
    engine: Any, plain: PlainMuon, plain_model: nn.Module, steps: Iterable[int], clipping: float = 0.0
) -> list[list[str]]:
    """Train both, and end the engine; the names of the parameters that differ after each step."""
    found = list(stepped(engine, plain, plain_model, steps, clipping))
    engine.destroy()
    return found


def stepped(
    engine: Any, plain: PlainMuon, plain_model: nn.Module, steps: Iterable[int], clipping: float
) -> Iterator[list[str]]:
    """Train both; yield the names of the parameters that differ after each step."""
    for step in steps:
        gradients = mean_gradients(plain_model, step)
        train(engine, step)
        scale = 1.0
        if clipping:
            norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)
            scale = float(torch.clamp(clipping / (norm + 1e-6), max=1.0))
            assert scale < 1.0
        plain.step(gradients, scale)
        yield equal(engine, plain_model)


def transforms(stage: int) -> tuple[int, int]:
    """The number of matrices that are stepped, and how many of them this rank made orthogonal in one step."""
    engine = started(stage, torch.float32)
    train(engine, 0)
    with longshore.trace(engine) as trace:
        train(engine, 1)
    matrices = sum(len(group["params"]) for group in engine.optimizer.param_groups if group.get("use_muon", True))
    engine.destroy()
    return matrices, sum(event.name == TRANSFORM for event in trace.events)


def one_rank_fails(stage: int) -> tuple[str, str]:
    """Newton-Schulz fails on rank 1, in the second step; the errors of that step and of the one after it."""
    engine = started(stage, torch.float32)
    train(engine, 0)
    failing = mock.patch("longshore.optim.rules.muon.newton_schulz", side_effect=RuntimeError("no memory"))
    errors = []
    for step in (1, 2):
        try:
            with failing if dist.get_rank() == 1 and step == 1 else mock.MagicMock():
                train(engine, step)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return errors[0], errors[1]


def no_memory_on_one_rank(stage: int) -> tuple[list[str], list[list[str]]]:
    """The device of rank 1 has no memory for the second step; the errors of each step, and the names of the parameters
    that differ after each from those of a loop that leaves the second one out."""
    plain_model = build()
    plain, engine = plain_of(plain_model), started(stage, torch.float32)
    failing = mock.patch("longshore.store.sharded.reserve", side_effect=torch.OutOfMemoryError("no memory"))
    errors, found = [], []
    for step in range(4):
        gradients = mean_gradients(plain_model, step)
        try:
            with failing if dist.get_rank() == 1 and step == 1 else contextlib.nullcontext():
                train(engine, step)
            errors.append("")
            plain.step(gradients)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            engine.optimizer.zero_grad()
        found.append(equal(engine, plain_model))
    engine.destroy()
    return errors, found


def save(stage: int, folder: str) -> None:
    engine = started(stage, torch.float32)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(stage: int, folder: str, saved_by: int) -> list[list[str]]:
    """The names of the parameters that differ after each step, from a checkpoint that ``saved_by`` ranks wrote."""
    plain_model = build()
    plain = plain_of(plain_model)
    for step in range(2):
        plain.step(mean_gradients(plain_model, step, saved_by))
    engine = started(stage, torch.float32)
    with warnings.catch_warnings():  # of other ranks, and so of another batch
        warnings.simplefilter("ignore", UserWarning)
        engine.load_checkpoint(folder)
    loaded = equal(engine, plain_model)
    return [loaded, *beside(engine, plain, plain_model, range(2, 4))]


def states(stage: int) -> tuple[bool, str]:
    """Whether the whole momentum of a matrix is the plain loop's, and the error for a state that it does not have."""
    plain_model = build()
    plain, engine = plain_of(plain_model), started(stage, torch.float32)
    for step in range(2):
        gradients = mean_gradients(plain_model, step)
        train(engine, step)
        plain.step(gradients)
    matrix = engine.module.tall.weight
    found = utils.safe_get_full_optimizer_state(matrix, "momentum_buffer")
    assert found is not None and utils.safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg") is not None
    try:
        utils.safe_get_full_optimizer_state(matrix, "exp_avg")
    except ValueError as error:
        return torch.equal(found, plain.momentum(plain_model.tall.weight)), str(error)
    finally:
        engine.destroy()
    return False, ""


def plain_of_configuration(model: Model, split: Mapping[str, Any]) -> PlainMuon:
    """The loop that has the numbers of :func:`configured`, with groups that are written by hand."""
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    hows = {name: how if isinstance(how, Mapping) else {"split": how} for name, how in split.items()}
    named = {name: each for name, each in model.named_parameters() if each.ndim > 1 and name != "embedding.weight"}
    adamw = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    groups = [{"params": [each], **hows.get(name, {})} for name, each in named.items()]
    groups.append({"params": [model.embedding.weight, *rest], "use_muon": False, **adamw})
    return PlainMuon(groups, lr=0.02, weight_decay=0.1)


def configured(stage: int, split: Mapping[str, Any], steps: int = 3) -> list[list[str]]:
    """The names of the parameters that differ after each step, of an engine whose configuration names Muon."""
    params = {"lr": 0.02, "adam_lr": 3e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "split": split}
    optimizer = {"type": "Muon", "params": {**params, "ns_method": "standard"}}
    plain_model = build()
    plain = plain_of_configuration(plain_model, split)
    engine, *_ = longshore.initialize(model=build(), config=configuration(stage, optimizer=optimizer))
    return beside(engine, plain, plain_model, range(steps))
