"""``states`` and ``states_seed`` of a configuration: the engine's states have that format on all ranks, or it is an
error that says why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from rich.console import Console
from support import small_model
from torch import nn

import longshore
from engine import states_cases
from engine.files import OPTIONS, file, started, train, without
from engine.states_cases import wide_model
from longshore.engine import ConfigError, setup

COUNTED = {"8bit": (2, 2 * 64 * 128), "bf16": (4, 3 * 128 + 64)}


def config_of(states: str | None = None, device: str = "cpu", **more: Any) -> dict[str, Any]:
    given = {"device": device, **({} if states is None else {"states": states}), **more}
    return without(file(zero_optimization={"stage": 1, "offload_optimizer": given}), "longshore")


def loss_of(model: Callable[..., Any], step: int) -> torch.Tensor:
    return model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).pow(2).mean()


def trained(config: dict[str, Any], **arguments: Any) -> tuple[list[torch.Tensor], int]:
    """Weights after some steps, and bytes of the state."""
    with started(config, wide_model(), **arguments) as engine:
        train(engine, (loss_of(engine, step) for step in range(5)))
        assert engine.config.states == engine.explain(print_it=False).states
        return [each.detach().clone() for each in engine.module.parameters()], engine.optimizer.host_bytes()["state"]


def plain(offload: longshore.Offload) -> list[torch.Tensor]:
    """Weights of the optimizer without an engine."""
    model = wide_model()
    optimizer = longshore.AdamW(model.named_parameters(), offload=offload, **OPTIONS)
    for step in range(5):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [each.detach() for each in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_formats_and_seeds_of_the_file() -> None:
    """The bits are those of ``longshore.Offload`` with the same values, and differ from each other."""
    settings = {("fp32", 0), ("bf16", 0), ("bf16", 5), ("8bit", 0), ("8bit", 5)}
    found = {(states, seed): trained(config_of(states, states_seed=seed)) for states, seed in settings}
    for (states, seed), (weights, _) in found.items():
        assert same(weights, plain(longshore.Offload(states=states, states_seed=seed))), (states, seed)
    assert not any(same(a[0], b[0]) for a, b in itertools.combinations(found.values(), 2))
    sizes = {states: size for (states, _), (_, size) in found.items()}
    assert sizes["8bit"] < 0.6 * sizes["bf16"] < 0.6 * 0.6 * sizes["fp32"]
    # Where states are does not change them, and a file without the keys means float32.
    assert same(trained(config_of("8bit", "none", states_seed=5))[0], found["8bit", 5][0])
    assert same(trained(config_of())[0], found["fp32", 0][0])


def test_deepspeeds_keys_of_the_file() -> None:
    expected, size = trained(config_of("bf16"))
    ours = config_of()
    params = {**ours["optimizer"]["params"], "fp32_optimizer_states": False}
    for theirs in ({"bf16": {"bf16_optimizer_states": True}}, {"optimizer": {"type": "AdamW", "params": params}}):
        with pytest.warns(UserWarning, match="rounded stochastically; DeepSpeed"):
            weights, bytes_taken = trained({**ours, **theirs})
        assert same(weights, expected) and bytes_taken == size


def test_an_offload_of_the_users_own_keeps_its_states(tmp_path: Path) -> None:
    own = longshore.Offload(states="8bit", states_seed=5)
    weights, _ = trained(config_of(), offload=own)
    assert same(weights, plain(own))
    for asked, told in (
        ({"states": "bf16"}, "states='bf16', .* states='8bit'"),
        ({"states": "8bit", "states_seed": 3}, "states_seed=3"),
    ):
        with pytest.raises(ValueError, match=f"the configuration has {told}"):
            started(config_of(**asked), wide_model(), offload=own).__enter__()
    with started(config_of(), wide_model(), offload=own) as engine:
        assert (engine.config.states, engine.config.states_seed) == ("8bit", 5)


def test_a_checkpoint_of_another_format_is_said(tmp_path: Path) -> None:
    with started(config_of("8bit", states_seed=5), wide_model()) as engine:
        train(engine, [loss_of(engine, 0)])
        engine.save_checkpoint(tmp_path)
    others = ("bf16", 5, "converted from 8bit to bf16"), ("8bit", 6, "states_seed=5, and here it is 6")
    for states, seed, told in others:
        with started(config_of(states, states_seed=seed), wide_model()) as engine:
            with pytest.warns(UserWarning, match=told):
                engine.load_checkpoint(tmp_path)
            train(engine, [loss_of(engine, 1)])
            assert engine.explain(print_it=False).states == states


def test_on_a_device_without_offload() -> None:
    """State that stays on a device is encoded, too; making the settings needs none."""
    config = longshore.Config(states="8bit", states_seed=5, tile_numel=64, detect_writes=False)
    ranks: Any = SimpleNamespace(device=torch.device("cuda"))
    binding: Any = None
    expected = longshore.Offload(64, device="none", detect_writes=False, states="8bit", states_seed=5)
    assert setup._offload(config, ranks, binding) == expected


# -- errors -----------------------------------------------------------------------


def test_a_configured_optimizer_that_has_none() -> None:
    config = {**config_of("bf16"), "optimizer": {"type": "Muon", "params": {"ns_method": "standard"}}}
    with pytest.raises(ConfigError, match=r"offload_optimizer\.states = \"bf16\": is for .* the states of Muon are"):
        longshore.initialize(model=wide_model(), config=config)


@pytest.mark.parametrize("kind", ["RMSprop", "RAdam", "Muon"])
def test_a_client_that_has_none(kind: str) -> None:
    """It is told by name, before anything of the user's optimizer is taken."""
    model = wide_model()
    client: Any
    if kind == "Muon":
        client = longshore.Muon(longshore.muon_groups(model, show=False))
    else:
        client = getattr(torch.optim, kind)(model.parameters())
    groups = client.param_groups
    told = f"states bf16 is for Adagrad, AdamW, Adam, Lion, SGD, and the states of {kind} are float32 always"
    with pytest.raises(ValueError, match=told):
        longshore.initialize(model=model, optimizer=client, config=without(config_of("bf16"), "optimizer"))
    assert client.param_groups is groups
    loss_of(model, 0).backward()
    client.step()


def test_encoded_states_of_a_client_do_not_become_others() -> None:
    model = wide_model()
    client = longshore.AdamW(model.parameters(), offload=longshore.Offload(states="8bit"))
    config = without(config_of(), "optimizer")
    with pytest.raises(ValueError, match=r"of optimizer= \(AdamW\) are 8bit .* are fp32 with 0: give states 8bit and"):
        longshore.initialize(model=model, optimizer=client, config=config)
    for other in (longshore.Offload(states="bf16"), longshore.Offload(states="8bit", states_seed=3)):
        told = rf"are 8bit with states_seed 0, by its Offload, and .* are {other.states} with {other.states_seed}"
        with pytest.raises(ValueError, match=told):
            longshore.from_client(client, offload=other)
    with started(without(config_of("8bit"), "optimizer"), model, optimizer=client) as engine:
        assert engine.explain(print_it=False).states_by_format == COUNTED


@pytest.mark.parametrize("by_offload", [False, True])
@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"states": "8bit"}, "\"states='8bit'\" in place of \"states='bf16'\""),
        ({"states": "bf16", "states_seed": 1}, "'states_seed=1' in place of 'states_seed=0'"),
    ],
    ids=["format", "seed"],
)
def test_ranks_with_different_ones(second: dict[str, Any], told: str, by_offload: bool, two_ranks: Ranks) -> None:
    for said in two_ranks(states_cases.set_up_with, [{"states": "bf16"}, second], by_offload):
        assert said.startswith(f"RankError: the configuration of rank 1 is not that of rank 0 ({told}); every rank has")


# -- explain() ----------------------------------------------------------------------


def page_of(engine: Any) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        engine.explain(print_it=False).print(console)
    return captured.get()


def test_explain() -> None:
    with started(config_of("8bit"), wide_model()) as engine:
        assert engine.explain(print_it=False).states_by_format == COUNTED
        assert (
            "optimizer states: 8bit for 2 parameters (16,384 elements), bf16 for the other 4 (448 elements), which "
            "have one dimension, fewer than 4,096 elements, or rows that are no multiple of 64 elements"
        ) in page_of(engine)
    with started(config_of("8bit"), nn.Linear(64, 64, bias=False)) as engine:
        assert "optimizer states: 8bit for 1 parameters (4,096 elements)\n" in page_of(engine)
    for states in ("bf16", "fp32"):
        with started(config_of(states), small_model()) as engine:
            assert f"optimizer states: {states}\n" in page_of(engine)
            assert [*engine.explain(print_it=False).states_by_format] == [states]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_explain_on_ranks(stage: int, two_ranks: Ranks) -> None:
    """Formats are of whole parameters, whatever part of them a rank has."""
    assert two_ranks(states_cases.formats, stage) == [COUNTED, COUNTED]
