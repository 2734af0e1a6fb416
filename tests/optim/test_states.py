"""``longshore.Offload(states=...)``: the one-line optimizers against the oracle on whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from plain_states import StatesLoop, mixed_model
from support import KINDS, Kind, same_weights
from torch import nn

import longshore

STATES_KINDS = [kind for kind in KINDS if kind.states]
EVERY_KIND = pytest.mark.parametrize("kind", STATES_KINDS, ids=lambda kind: kind.name)
FORMATS = pytest.mark.parametrize("states", ["bf16", "8bit"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def offload(states: str, tile_numel: int | None = None, **options: Any) -> longshore.Offload:
    return longshore.Offload(tile_numel, states=states, **options)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    first = next(model.parameters())
    x = torch.randn(6, 64, generator=generator).to(first.dtype)
    (model(x).float() * (1 + step)).pow(2).mean().backward()


def loop_of(kind: Kind, model: nn.Module, states: str, groups: Iterable[Any] | None = None, **options: Any) -> Any:
    given = list(model.parameters()) if groups is None else list(groups)
    return StatesLoop(given, model.named_parameters(), kind.name, states, **{**kind.options, **options})


def check(model: nn.Module, optimizer: Any, plain_model: nn.Module, plain: StatesLoop) -> None:
    """Equal weights and states."""
    for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        index = [id(each) for each in plain.parameters].index(id(theirs))
        kept = plain.kept[index]
        state = optimizer.state.get(ours, {})
        assert state.get("step", 0) == kept.step, name
        for key in kept.names if kept.has_states else ():
            assert torch.equal(state[key], plain.state(index, key)), (name, key)


def formats_of(optimizer: Any) -> set[str]:
    return {tile.format.value for tile in optimizer._core.members.store.tiles}


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


# --- against the oracle ---


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@EVERY_KIND
@FORMATS
@DTYPES
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_every_optimizer_equals_the_oracle(kind: Kind, states: str, dtype: torch.dtype, release: bool) -> None:
    """With parameters that are idle now and then, so that step counts differ."""
    plain_model, model = mixed_model(dtype), mixed_model(dtype)
    plain = loop_of(kind, plain_model, states)
    optimizer = kind.make(model.named_parameters(), release_gradients=release, offload=offload(states))
    for step, idle in enumerate([(), (0, 2), (), (1, 6, 7), (), ()]):
        for each in (plain_model, model):
            for index, parameter in enumerate(each.parameters()):
                parameter.requires_grad_(index not in idle)
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain_model, plain)
    assert formats_of(optimizer) == ({"bf16"} if states == "bf16" else {"bf16", "8bit"})
    others = [mixed_model(dtype) for _ in range(2)]
    for other, how in zip(others, (offload("fp32"), offload(states, states_seed=1)), strict=True):
        train(other, kind.make(other.named_parameters(), offload=how), range(6))
        assert all(parameter.isfinite().all() for parameter in other.parameters())
    if dtype == torch.float32:  # rounding bites, and so do its random bits
        assert not same_weights(*others) and not same_weights(model, others[0])


@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("repeated", [True, False])
def test_groups_and_changing_options(kind: Kind, states: str, repeated: bool) -> None:
    """The repeated step, which goes by addresses alone, and steps that it leaves to the regular one."""
    plain_model, model = mixed_model(torch.bfloat16), mixed_model(torch.bfloat16)

    def groups(of: nn.Sequential, named: bool) -> list[dict[str, Any]]:
        entries = list(of.named_parameters())
        found: Any = [entries[:2], entries[2:]]
        if not named:
            found = [[parameter for _, parameter in each] for each in found]
        return [{"params": found[0], "lr": 1e-2, "weight_decay": 0.0}, {"params": found[1], "maximize": True}]

    plain = loop_of(kind, plain_model, states, groups(plain_model, False))
    optimizer = kind.make(groups(model, True), offload=offload(states, 1000))
    for step in range(6):
        if not repeated and step % 2:
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 1e-2 / step
            with torch.no_grad():
                for each in (plain_model, model):
                    each.get_parameter("4.weight").data.clamp_(-0.1, 0.1)  # where torch cannot see it
            plain.refresh_all()
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()  # which stays, as for a repeated step
        check(model, optimizer, plain_model, plain)


# --- what changes no bit ---


def simulated_in(states: str, tile_numel: int, **options: Any) -> longshore.Offload:
    transfer = longshore.SimulatedTransfer(seed=3, max_delay_s=0.0002)
    return longshore.Offload(tile_numel, states=states, transfer=transfer, **options)


AHEAD = {"speculation_memory": "100%"}
HOWS: dict[str, tuple[bool, Any]] = {
    "tiles of one block": (False, lambda states: offload(states, 64)),
    "tiles of 1000, one thread": (False, lambda states: offload(states, 1000, threads=1)),
    "seven threads": (False, lambda states: offload(states, threads=7)),
    "released": (True, lambda states: offload(states, 1500)),
    "copied": (False, lambda states: simulated_in(states, 700)),
    "copied and released": (True, lambda states: simulated_in(states, 700, threads=1)),
    "stepped ahead": (True, lambda states: offload(states, 1000, **AHEAD)),
    "copied and stepped ahead": (True, lambda states: simulated_in(states, 700, **AHEAD)),
    "on the device": (True, lambda states: offload(states, 1000, device="none")),
    "split": (True, lambda states: simulated_in(states, 700, ratio=0.4)),
}


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize("how", HOWS)
@FORMATS
@DTYPES
@pytest.mark.parametrize("kind", STATES_KINDS, ids=lambda kind: kind.name)
def test_how_it_is_done_changes_no_bit(how: str, states: str, dtype: torch.dtype, kind: Kind) -> None:
    plain_model, model = mixed_model(dtype), mixed_model(dtype)
    release, make = HOWS[how]
    plain = loop_of(kind, plain_model, states)
    optimizer = kind.make(model.named_parameters(), release_gradients=release, offload=make(states))
    kept = 0
    for step in range(6):
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        if (record := optimizer.speculation) is not None:
            kept += record.kept
    check(model, optimizer, plain_model, plain)
    assert (kept > 0) == ("ahead" in how)


@FORMATS
@pytest.mark.parametrize("clip", [1e-2, 1e9])
def test_a_step_ahead_that_was_wrong_is_made_again(states: str, clip: float) -> None:
    """With the same random bits."""
    plain_model, model = mixed_model(), mixed_model()
    kind = KINDS[0]
    plain = loop_of(kind, plain_model, states)
    optimizer = kind.make(model.named_parameters(), release_gradients=True, offload=offload(states, 1000, **AHEAD))
    redone = 0
    for step in range(6):
        for each in (plain_model, model):
            backward(each, step)
        norm = optimizer.clip_grad_norm_(clip if step % 2 else 1e9)
        limit = clip if step % 2 else 1e9
        plain.step_on_grads(float(torch.clamp(limit / (norm.float() + 1e-6), max=1.0)))
        optimizer.step()
        optimizer.zero_grad()
        redone += optimizer.speculation.redone
        check(model, optimizer, plain_model, plain)
    assert (redone > 0) == (clip < 1)


@FORMATS
def test_bits_belong_to_the_name_and_the_seed(states: str) -> None:
    """Not to the parts of wrappers in the name."""

    def trained(seed: int = 0, name: Any = lambda name: name) -> nn.Module:
        model = mixed_model()
        named = [(name(each), parameter) for each, parameter in model.named_parameters()]
        optimizer = longshore.AdamW(named, lr=1e-2, offload=longshore.Offload(states=states, states_seed=seed))
        train(model, optimizer, range(4))
        return model

    first = trained()
    assert same_weights(first, trained())
    assert same_weights(first, trained(name=lambda name: f"_orig_mod.{name}"))
    assert same_weights(first, trained(name=lambda name: f"_fsdp_wrapped_module._checkpoint_wrapped_module.{name}"))
    assert not same_weights(first, trained(seed=1))
    assert not same_weights(first, trained(seed=2**63 - 1))
    assert not same_weights(first, trained(name=lambda name: f"model.{name}"))


def test_equal_parameters_with_equal_gradients_are_rounded_apart() -> None:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(model.get_parameter("0.weight"))
    for states in ("bf16", "8bit"):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, offload=offload(states))
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, 4096).view(64, 64)
        optimizer.step()
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        assert 0.05 < (moments[0] != moments[1]).float().mean() < 0.95


# --- memory ---


@pytest.mark.parametrize(
    ("states", "expected"), [("fp32", 12.0), ("bf16", 8.0), ("8bit", 6.125)], ids=["fp32", "bf16", "8bit"]
)
def test_the_host_holds_what_the_format_takes(states: str, expected: float) -> None:
    model = nn.Linear(256, 256, bias=False).bfloat16()
    optimizer = longshore.AdamW(model.named_parameters(), offload=offload(states, 4096))
    model(torch.randn(3, 256).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.host_bytes()["state"] == expected * 256 * 256


def test_a_seed_of_states_that_are_not_rounded() -> None:
    with pytest.raises(ValueError, match="states is 'fp32', which rounds nothing: give states, too, or leave"):
        longshore.Offload(states_seed=7)


@pytest.mark.parametrize("options", [{}, {"momentum": 0}, {"momentum": 0.0, "nesterov": False}])
def test_a_format_of_no_states(options: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    with pytest.warns(UserWarning, match="SGD has no states .* states='8bit' changes nothing until") as told:
        longshore.SGD([parameter], lr=0.1, offload=longshore.Offload(states="8bit"), **options)
    assert [each.filename for each in told] == [__file__]
    groups = [{"params": [parameter], "momentum": 0.5}, {"params": [torch.nn.Parameter(torch.ones(3))]}]
    longshore.SGD(groups, lr=0.1, offload=longshore.Offload(states="8bit"), **options)  # warnings are errors


@FORMATS
@DTYPES
@pytest.mark.filterwarnings("ignore:SGD has no states")
def test_momentum_may_come_and_go(states: str, dtype: torch.dtype) -> None:
    """Without it SGD has no states, and nothing is rounded. Buffers grow when it comes, and stay when it goes."""
    plain_model, model = mixed_model(dtype), mixed_model(dtype)
    kind = Kind("SGD", ("momentum_buffer",), {"lr": 1e-3, "momentum": 0.0})
    plain = loop_of(kind, plain_model, states)
    optimizer = kind.make(model.named_parameters(), offload=offload(states, 1000))
    sizes = []
    for step, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.5]):
        plain.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"] = momentum
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain_model, plain)
        sizes.append(optimizer.host_bytes()["state"])
    assert sizes[0] < sizes[1] == sizes[4]
