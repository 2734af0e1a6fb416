"""``"type": "Muon"`` in a configuration: the division of a model's parameters, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from plain_muon import Model, build
from ranks import Ranks
from torch import nn

import longshore
from engine import muon_cases as cases
from longshore.engine.config import ConfigError, load_config
from longshore.engine.config.optimizers import MuonConfig

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")

SPLIT = {"qkv.weight": 3, "experts": "stack", "columns": {"split": 2, "split_dim": 1}}


def file_of(**params: Any) -> dict[str, Any]:
    return cases.configuration(0, optimizer={"type": "muon", "params": {"ns_method": "standard", **params}})


def loaded(**params: Any) -> MuonConfig:
    config, notes = load_config(file_of(**params))
    assert not [note for note in notes if "Muon" in note]
    assert isinstance(config.optimizer, MuonConfig)
    return config.optimizer


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 3])
def test_weights(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(cases.configured, stage, SPLIT) == [[[]] * 3] * 2


def test_rates_and_decays_of_both_kinds() -> None:
    """One value is for both, and each kind may have its own; ``betas`` and ``eps`` are Adam's."""
    both = loaded(lr=0.1, weight_decay=0.2, betas=[0.8, 0.9], eps=1e-6)
    assert both.options()["lr"] == both.adamw_options()["lr"] == 0.1
    assert both.options()["weight_decay"] == both.adamw_options()["weight_decay"] == 0.2
    assert both.adamw_options() | {"betas": (0.8, 0.9), "eps": 1e-6} == both.adamw_options()
    assert both.options()["eps"] == 1e-7
    own = loaded(lr=0.1, muon_lr=0.3, adam_lr=0.4, adam_weight_decay=0.5)
    assert (own.options()["lr"], own.adamw_options()["lr"]) == (0.3, 0.4)
    assert (own.options()["weight_decay"], own.adamw_options()["weight_decay"]) == (0.0, 0.5)
    none = loaded()
    adamw = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    assert none.options()["lr"] == 0.02 and none.adamw_options() == adamw  # DeepSpeed's


def test_options_are_those_of_the_optimizer() -> None:
    values = {"momentum": 0.5, "nesterov": False, "ns_coefficients": [1, 2, 3], "ns_eps": 1e-5, "ns_steps": 3}
    engine = started(build(), **values, adjust_lr_fn="match_rms_adamw", split=SPLIT)
    group = engine.optimizer.param_groups[0]
    expected = {**values, "ns_coefficients": (1.0, 2.0, 3.0), "eps": 1e-5, "adjust_lr_fn": "match_rms_adamw"}
    del expected["ns_eps"]
    assert group | expected == group
    engine.destroy()


def test_the_default_method_of_deepspeed_is_worth_a_note() -> None:
    file = cases.configuration(0, optimizer={"type": "Muon", "params": {"lr": 0.02}})
    assert any("Gram Newton-Schulz" in note for note in load_config(file).notes)


@pytest.mark.parametrize(
    ("params", "path", "words"),
    [
        ({"ns_method": "gram"}, "ns_method", "Gram Newton-Schulz has other numbers"),
        ({"per_head_muon": True}, "per_head_muon", "say how many heads each projection has in split"),
        ({"adam_w_mode": False}, "adam_w_mode", "AdamW steps"),
        ({"split": {"a": 0}}, "split", "a section of patterns"),
        ({"split": {"a": {"split_dim": 1}}}, "split", "a section of patterns"),
        ({"split": 3}, "split", "a section of patterns"),
        ({"ns_steps": 100}, "ns_steps", "at most 99"),
        ({"amsgrad": True}, "amsgrad", "is no"),
    ],
)
def test_refused(params: Mapping[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file_of(**params))
    [problem] = caught.value.problems
    assert problem.path == f"optimizer.params.{path}" and words in problem.what


# -- how parameters are divided -----------------------------------------------


def started(model: nn.Module, model_parameters: Any = None, **params: Any) -> Any:
    engine, *_ = longshore.initialize(model=model, model_parameters=model_parameters, config=file_of(**params))
    return engine


def division(engine: Any, model: nn.Module) -> dict[str, Any]:
    """By name, what a parameter's group says."""
    names = {id(each): name for name, each in model.named_parameters()}
    return {
        names[id(parameter)]: group.get("split") if group["use_muon"] else "AdamW"
        for group in engine.optimizer.param_groups
        for parameter in group["params"]
    }


def test_as_muon_groups_divides(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    engine = started(model, split=SPLIT, others=["wide*"])
    found = division(engine, model)
    assert found == {name: "AdamW" for name, _ in model.named_parameters()} | {
        "qkv.weight": 3,
        "grouped.weight": None,
        "columns": 2,
        "tall.weight": None,
        "experts": "stack",
    }
    assert "Muon " in capsys.readouterr().out  # it is shown
    engine.destroy()


def test_marks_of_parameters() -> None:
    """As DeepSpeed's users set them; what Muon steps by them is one matrix, unless the configuration says otherwise."""
    model = build()
    for name, parameter in model.named_parameters():
        parameter.use_muon = name in ("embedding.weight", "tall.weight", "columns")  # pyright: ignore
    engine = started(model, split={"columns": 2})
    found = division(engine, model)
    assert {name: how for name, how in found.items() if how != "AdamW"} == {
        "embedding.weight": None,
        "tall.weight": None,
        "columns": 2,
    }
    engine.destroy()


def test_groups_of_the_user() -> None:
    """A group's own options are those of its parts; a group with a mark stays as it is."""
    model = build()
    kept = {"params": [model.experts], "use_muon": True, "split": "stack", "lr": 1.0}
    groups = [
        {"params": [model.tall.weight, model.tall.bias], "lr": 0.5, "betas": (0.1, 0.2), "momentum": 0.7},
        {"params": [model.embedding.weight], "weight_decay": 0.0},
        kept,
        {"params": [model.norm.weight], "use_muon": False},
    ]
    engine = started(model, groups, lr=0.1, eps=1e-3)
    tall, bias, embedding, experts, norm = engine.optimizer.param_groups
    assert tall["use_muon"] and (tall["lr"], tall["momentum"]) == (0.5, 0.7) and "betas" not in tall
    assert not bias["use_muon"] and (bias["lr"], bias["betas"], bias["eps"]) == (0.5, (0.1, 0.2), 1e-3)
    assert "momentum" not in bias and "ns_steps" not in bias
    assert not embedding["use_muon"] and (embedding["lr"], embedding["weight_decay"]) == (0.1, 0.0)
    assert experts["split"] == "stack" and experts["lr"] == 1.0
    assert (norm["lr"], norm["eps"]) == (0.1, 1e-3)
    engine.destroy()


def test_errors_name_parameters_and_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"qkv.weight.*looks as if.*in optimizer.params of the configuration"):
        started(build(), split={"experts": "stack"})
    with pytest.raises(ValueError, match="'attention' is the name of no"):
        started(build(), split={**SPLIT, "attention": 3})
    model = build()
    model.qkv.weight.use_muon = True  # pyright: ignore
    with pytest.raises(ValueError, match=r"without an attribute use_muon.*: .*columns"):
        started(model, split=SPLIT)
    model = Model(torch.float32)
    for parameter in model.parameters():
        parameter.use_muon = True  # pyright: ignore
    with pytest.raises(ValueError, match=r"parameter .*bias is \[.*\], and Muon steps matrices"):
        started(model, split=SPLIT)
    with pytest.raises(ValueError, match=r"0\.0 of model_parameters: not in the model"):
        started(build(), [nn.Parameter(torch.ones(3, 3))], split={})


def test_marks_that_are_no_bool() -> None:
    model = build()
    for parameter in model.parameters():
        parameter.use_muon = "no"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"use_muon of parameter .* is 'no'; it is True or False"):
        started(model)
