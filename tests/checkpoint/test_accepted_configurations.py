"""What an engine's configuration is accepted with, its checkpoints are saved and loaded with: over all fields."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from compat.config.strategies import insert
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import longshore
from checkpoint.test_accepted_settings import same
from longshore.compat.config.keys import Treatment
from longshore.compat.config.kinds import Block
from longshore.compat.config.table import TABLE
from longshore.engine.config import Config, FlopsProfilerConfig, LossScaling
from longshore.engine.config.base import FrozenModel
from longshore.engine.config.model import MONITORS
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from longshore.engine.config.values import (
    MOST_INTEGER,
    Budget,
    Either,
    Exactly,
    Infinite,
    Items,
    Kind,
    Number,
    OneOf,
    Splits,
    kind_in,
)

REFUSED = (ValueError, TypeError, longshore.LongshoreError)


def edges_of(kind: Number) -> list[Any]:
    """Legal numbers at both ends of a kind, and just beyond."""
    low = kind.minimum if kind.minimum is not None else kind.above
    high = kind.maximum if kind.maximum is not None else kind.below
    if kind.whole:
        found = [*(() if low is None else (int(low), int(low) + 1, int(low) - 1)), 1, 2]
        return [*found, *((MOST_INTEGER, MOST_INTEGER + 1) if high is None else (int(high), int(high) + 1))]
    found = [5e-324, 1e-45, 0.5, 1, 1.0, -0.0]
    for bound in (low, high):
        if bound is not None:
            found += [bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)]
    return [*found, *((1e30, torch.finfo(torch.float32).max, 1e39, sys.float_info.max) if high is None else ())]


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Exactly):
        by_type: dict[Any, st.SearchStrategy[Any]] = {
            bool: st.booleans(),
            str: st.sampled_from(["", "a", "ä b", "x/y", "Linear", "0"]),
        }
        return by_type.get(kind.of, st.just({}))
    if isinstance(kind, Number):
        return st.sampled_from(edges_of(kind))
    if isinstance(kind, OneOf):
        return st.sampled_from(kind.options)
    if isinstance(kind, Budget):
        return st.sampled_from([0, "auto", "100%", "0%", "25 %", "1KiB", 1024, MOST_INTEGER])
    if isinstance(kind, Items):
        return st.lists(values_of(kind.of), min_size=kind.count or 0, max_size=kind.count or 2)
    if isinstance(kind, Either):
        return st.one_of([values_of(one) for one in kind.kinds])
    if isinstance(kind, Infinite):
        return st.just(math.inf)
    if isinstance(kind, Splits):
        return st.sampled_from([{}, {"0.weight": 2}, {"*": None}, {"0.weight": {"split": [4, 12], "split_dim": 1}}])
    assert isinstance(kind, Block), kind
    return st.sampled_from([{}, False])


NESTED: dict[str, list[type[FrozenModel]]] = {
    "loss_scaling": [LossScaling],
    "optimizer": [*OPTIMIZER_CONFIGS.values()],
    "scheduler": [*SCHEDULER_CONFIGS.values()],
    "flops_profiler": [FlopsProfilerConfig],
    **{name: [model] for name, model in MONITORS.items() if name != "wandb"},  # which speaks to a server
}
FEW: dict[str, st.SearchStrategy[Any]] = {
    "gradient_accumulation_steps": st.sampled_from([1, 2, 3]),  # as many backwards are run
    "threads": st.sampled_from([0, 1, 2, 4097]),  # as many threads are made
    "tile_numel": st.sampled_from([1, 7, 64, MOST_INTEGER]),
}
LEFT_OUT = {"type", "wandb", "train_batch_size"}
"""``train_batch_size`` follows from the other two, and has to agree with them."""


def fields_of(model: type[FrozenModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a model, with values for them."""
    options: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in model.model_fields.items():
        if name in LEFT_OUT or (model is Config and name == "optimizer"):
            continue
        if model is Config and name in NESTED:
            options[name] = st.one_of([nested(each) for each in NESTED[name]])
        else:
            options[name] = FEW.get(name, values_of(kind_in(field.metadata)))
    # A few at a time: most values are refused beside most others.
    return st.lists(st.sampled_from(sorted(options)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


def nested(model: type[FrozenModel]) -> st.SearchStrategy[dict[str, Any]]:
    kind = {"type": model.model_fields["type"].default} if "type" in model.model_fields else {}
    required = {
        name: values_of(kind_in(field.metadata)) for name, field in model.model_fields.items() if field.is_required()
    }
    return st.tuples(st.fixed_dictionaries(required), fields_of(model)).map(lambda two: {**two[0], **two[1], **kind})


CONFIGURATIONS = st.tuples(st.one_of([nested(each) for each in OPTIMIZER_CONFIGS.values()]), fields_of(Config)).map(
    lambda two: {**two[1], "optimizer": two[0]}
)


def made(fields: Mapping[str, Any]) -> Config:
    models = {"loss_scaling": LossScaling, "flops_profiler": FlopsProfilerConfig, **MONITORS}
    return Config(**{name: models[name](**value) if name in models else value for name, value in fields.items()})


def network(seed: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def step(engine: Any, number: int) -> None:
    for backward in range(engine.gradient_accumulation_steps()):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * number + backward))
        x = x.to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def attempt(engine: Any, number: int) -> str:
    """Make a step; return the error that a schedule, or a loss that is not finite, may raise."""
    try:
        step(engine, number)
    except REFUSED as error:
        engine.zero_grad()
        return f"{type(error).__name__}: {error}"
    return ""


def state_of(engine: Any) -> list[Any]:
    weights = [each.detach().float() for each in engine.module.parameters()]
    numbers = engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.loss_scaling.value, engine.get_lr()
    return [engine.optimizer.state_dict(), weights, numbers]


def check(config: Callable[[], Any]) -> bool:
    """Train, save, and go on in a fresh engine; return whether the configuration was accepted."""
    at = os.getcwd()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        os.chdir(folder)  # reports are written there
        try:
            try:
                first = longshore.initialize(model=network(), config=config()).engine
            except REFUSED:
                return False
            try:
                if attempt(first, 0):
                    return False
                first.save_checkpoint("saved")
                second = longshore.initialize(model=network(3), config=config()).engine
                try:
                    second.load_checkpoint("saved")
                    assert same(state_of(second), state_of(first))
                    for number in (1, 2):
                        assert attempt(second, number) == attempt(first, number)
                        assert same(state_of(second), state_of(first))
                finally:
                    second.destroy()
            finally:
                first.destroy()
        finally:
            os.chdir(at)
    return True


@pytest.mark.medium
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=CONFIGURATIONS)
@example(fields={"optimizer": {"type": "Muon", "ns_coefficients": [1.0, 1.0, 1e39]}})
@example(fields={"optimizer": {"type": "Muon", "ns_eps": torch.finfo(torch.float32).max}})
@example(fields={"optimizer": {"type": "Muon", "ns_eps": 2.0**128 - 2.0**120, "ns_coefficients": [2.0**127] * 3}})
@example(fields={"states": "bf16", "states_seed": MOST_INTEGER, "optimizer": {"type": "AdamW"}})
def test_what_a_config_accepts_is_saved_and_loaded(fields: dict[str, Any]) -> None:
    check(lambda: made({"offload_device": "cpu", **fields}))


KEYS = [
    key
    for key in TABLE
    if key.treatment is Treatment.HONOURED and not key.path.startswith("wandb") and key.name != "train_batch_size"
]


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A DeepSpeed file with a few honoured keys, in sections that are on."""
    file: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    file["zero_optimization"] = {"stage": draw(st.integers(0, 3)), "offload_optimizer": {"device": "cpu"}}
    file["optimizer"] = {"type": draw(st.sampled_from(sorted(OPTIMIZER_CONFIGS))), "params": {}}
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=5, unique_by=lambda key: key.path)):
        insert(file, key, draw(FEW.get(key.name, values_of(key.kind))))
    if "params" in file.get("scheduler", {}):
        file["scheduler"].setdefault("type", draw(st.sampled_from(sorted(SCHEDULER_CONFIGS))))
    for section in ("fp16", "bf16", "torch_autocast", "flops_profiler", *MONITORS):
        if section in file:
            file[section]["enabled"] = section != "wandb"
    return file


@pytest.mark.medium
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(file=files())
def test_what_a_file_is_accepted_with_is_saved_and_loaded(file: dict[str, Any]) -> None:
    check(lambda: json.loads(json.dumps(file)))


@pytest.mark.parametrize(
    "fields",
    [
        {"states": "bf16", "states_seed": MOST_INTEGER, "optimizer": {"type": "AdamW"}},
        {"autocast": "fp16", "loss_scaling": {"initial_scale_power": 127}, "optimizer": {"type": "SGD", "lr": 1e30}},
        {"stage": 3, "dtype": "bf16", "gradient_clipping": 5e-324, "optimizer": {"type": "Lion", "lr": 1e-45}},
        {"scheduler": {"type": "WarmupLR", "warmup_num_steps": MOST_INTEGER}, "optimizer": {"type": "Adagrad"}},
        {"tile_numel": 1, "speculation_memory": "100%", "optimizer": {"type": "Muon", "ns_steps": 99}},
    ],
)
def test_these_are_accepted(fields: dict[str, Any]) -> None:
    assert check(lambda: made({"offload_device": "cpu", **fields}))
