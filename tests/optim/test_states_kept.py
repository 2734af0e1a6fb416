"""States that are not float32 in ``state``, ``state_dict()`` and on shards, and the optimizers that have none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim import states_cases
from optim.test_states import EVERY_KIND, FORMATS, backward, check, loop_of, offload, train
from plain_states import StatesLoop, mixed_model, to_nearest
from ranks import Ranks
from support import KINDS, Kind, same_weights
from torch import nn

import longshore
from longshore.layout.formats import BLOCK_NUMEL


def both(kind: Kind, states: str, dtype: torch.dtype = torch.bfloat16, steps: int = 3) -> tuple[Any, ...]:
    """A model and its optimizer, and the oracle's twins, after some steps."""
    plain_model, model = mixed_model(dtype), mixed_model(dtype)
    plain = loop_of(kind, plain_model, states)
    optimizer = kind.make(model.named_parameters(), offload=offload(states, 1000))
    for step in range(steps):
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, plain_model, plain


def go_on(model: nn.Module, optimizer: Any, plain_model: nn.Module, plain: StatesLoop, steps: range) -> None:
    for step in steps:
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        check(model, optimizer, plain_model, plain)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@EVERY_KIND
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_going_on_from_a_state_dict_equals_not_stopping(kind: Kind, states: str, dtype: torch.dtype) -> None:
    """As with other rules, in tiles of another size; the step count is part of SGD's state, too."""
    model, optimizer, plain_model, plain = both(kind, states, dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {key for state in saved["state"].values() for key in state} >= {"step", *kind.states}
    other = mixed_model(dtype, seed=7)
    other.load_state_dict(model.state_dict())
    loaded = kind.make(other.named_parameters(), lr=0.5, offload=offload(states, 640))
    loaded.load_state_dict(saved)
    check(other, loaded, plain_model, plain)
    go_on(other, loaded, plain_model, plain, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert same_weights(model, other)


@FORMATS
def test_without_the_step_count_the_random_bits_are_others(states: str) -> None:
    """As in a state of torch's SGD, which keeps none: it counts from 0."""
    kind = KINDS[4]
    model, optimizer, _, _ = both(kind, states)
    saved = copy.deepcopy(optimizer.state_dict())
    moments = []
    for step in (None, 0, 3):
        other = mixed_model(torch.bfloat16)
        other.load_state_dict(model.state_dict())
        loaded = kind.make(other.named_parameters(), offload=offload(states))
        for state in saved["state"].values():
            state.pop("step", None)
            if step is not None:
                state["step"] = torch.tensor(float(step))
        loaded.load_state_dict(saved)
        train(other, loaded, range(3, 4))
        moments.append(loaded.state[other[0].weight]["momentum_buffer"].clone())
    assert torch.equal(moments[0], moments[1]) and not torch.equal(moments[0], moments[2])
    train(model, optimizer, range(3, 4))
    assert torch.equal(moments[2], optimizer.state[model[0].weight]["momentum_buffer"])


@EVERY_KIND
@FORMATS
def test_a_float32_state_is_rounded_to_nearest(kind: Kind, states: str) -> None:
    """And back: what was rounded is loaded into float32 as it is."""
    model = mixed_model(torch.bfloat16)
    first = kind.make(model.named_parameters(), offload=offload("fp32"))
    train(model, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():  # torch's SGD keeps no step count
        state.setdefault("step", torch.tensor(3.0))
    optimizer = kind.make(model.named_parameters(), offload=offload(states))
    optimizer.load_state_dict(saved)
    plain_model = copy.deepcopy(model)
    plain = loop_of(kind, plain_model, states)
    changed = 0
    for index, (parameter, kept) in enumerate(zip(model.parameters(), plain.kept, strict=True)):
        kept.step, kept.has_states = 3, True
        kept.buffer.master.copy_(saved["state"][index]["master"].reshape(-1))
        for name in kind.states:
            exact = saved["state"][index][name]
            kept.write(name, exact)
            found = optimizer.state[parameter][name]
            assert torch.equal(found, to_nearest(exact, states, name))
            changed += int((found != exact).sum())
    assert changed > 1000
    again = kind.make(model.named_parameters(), offload=offload("fp32"))
    again.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        for name in kind.states:
            assert torch.equal(again.state[parameter][name], optimizer.state[parameter][name])
    go_on(model, optimizer, plain_model, plain, range(3, 5))


@FORMATS
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_user_writes_is_rounded_to_nearest(states: str, in_place: bool) -> None:
    model, optimizer, plain_model, plain = both(KINDS[0], states)
    for index, (parameter, kept) in enumerate(zip(model.parameters(), plain.kept, strict=True)):
        for name in ("exp_avg", "exp_avg_sq"):
            values = optimizer.state[parameter][name] * 1.0371
            kept.write(name, values)
            if in_place:
                optimizer.state[parameter][name].mul_(1.0371)
            else:
                optimizer.state[parameter][name] = values
            assert not torch.equal(to_nearest(values, states, name), values) or index > 5
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = torch.tensor(40.0)
    for kept in plain.kept:
        kept.step = 40
    go_on(model, optimizer, plain_model, plain, range(3, 6))


@FORMATS
def test_writing_what_was_read_changes_nothing(states: str) -> None:
    model, optimizer, plain_model, plain = both(KINDS[0], states)
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq", "master"):
            optimizer.state[parameter][name] = optimizer.state[parameter][name].clone()
    go_on(model, optimizer, plain_model, plain, range(3, 5))


def test_special_values_in_a_state_stay() -> None:
    model = nn.Linear(64, 64, bias=False)
    values = torch.zeros(64, 64)
    values[0, :4] = torch.tensor([float("inf"), float("nan"), 1e-30, 3.0])
    for states in ("bf16", "8bit"):
        optimizer = longshore.AdamW(model.named_parameters(), offload=offload(states))
        loaded = {"step": torch.tensor(1.0), "exp_avg": values, "exp_avg_sq": values}
        optimizer.load_state_dict({"state": {0: loaded}, "param_groups": optimizer.state_dict()["param_groups"]})
        for name in ("exp_avg", "exp_avg_sq"):
            found = optimizer.state_dict()["state"][0][name]
            assert torch.equal(found.isnan(), values.isnan()) and torch.equal(found.isinf(), values.isinf())
            assert found[0, 3] == 3.0 and (found[1:] == 0).all()
            assert (found[0, 2] > 0) == (states == "bf16" or name == "exp_avg_sq")


@FORMATS
def test_a_state_that_is_deleted_begins_anew(states: str) -> None:
    """At zero, and with the random bits of the first step; the master stays what the parameter is."""
    model, optimizer, _, _ = both(KINDS[0], states, torch.float32)
    other = mixed_model()
    other.load_state_dict(model.state_dict())
    fresh = KINDS[0].make(other.named_parameters(), offload=offload(states))
    for parameter in model.parameters():
        del optimizer.state[parameter]
    for each, own in ((model, optimizer), (other, fresh)):
        train(each, own, range(3, 5))
    assert same_weights(model, other)


@FORMATS
def test_an_optimizer_that_is_copied_goes_on_alike(states: str) -> None:
    model, optimizer, plain_model, plain = both(KINDS[0], states)
    other, copied = copy.deepcopy((model, optimizer))
    go_on(other, copied, plain_model, plain, range(3, 5))


# --- shards ---


@pytest.mark.needs_torch("FSDP2 over gloo")
@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("release", [False, True])
def test_shards_are_encoded_as_the_whole(states: str, release: bool, two_ranks: Ranks) -> None:
    two_ranks(states_cases.shards_are_encoded_as_the_whole, states, release)


def test_shards_whose_places_are_unknown_are_refused(two_ranks: Ranks) -> None:
    two_ranks(states_cases.a_state_that_is_sharded_otherwise, "8bit")


# --- what is refused ---


@FORMATS
def test_optimizers_whose_states_stay_float32_are_refused(states: str) -> None:
    model, config = mixed_model(), longshore.Config()
    rmsprop = torch.optim.RMSprop(model.parameters())
    with pytest.raises(ValueError, match=f"states {states} is for .* and the states of RMSprop are float32 always"):
        longshore.initialize(model=model, optimizer=rmsprop, config=config, offload=offload(states))
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ValueError, match=f"states='{states}' is for Adam"):
            longshore.Muon([model[0].weight], offload=offload(states))
    adam = torch.optim.Adam(model.parameters())  # in whose place comes one of ours
    longshore.initialize(model=model, optimizer=adam, config=config, offload=offload(states)).engine.destroy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": "int8"}, "states is the format of the optimizer's states, 'fp32', 'bf16', '8bit', not 'int8'"),
        ({"states": None}, "states is the format"),
        ({"states_seed": 0.5}, r"states_seed is an integer from 0 to 2\*\*63 - 1, not 0.5"),
        ({"states_seed": True}, r"states_seed is an integer from 0 to 2\*\*63 - 1, not True"),
    ],
)
def test_settings_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longshore.Offload(**options)


def test_blocks_are_those_of_the_whole_parameter() -> None:
    """So that an 8-bit state is loaded as it was, into tiles of any size."""
    assert BLOCK_NUMEL == 64
    for tile_numel in (64, 100, 1000, 5000):
        model = mixed_model()
        optimizer = longshore.AdamW(model.named_parameters(), offload=offload("8bit", tile_numel))
        train(model, optimizer, range(1))
        segments = [
            each
            for tile in optimizer._core.members.store.tiles
            if tile.format.value == "8bit"
            for each in tile.layout.segments
        ]
        assert segments and all(each.parameter_offset % 64 == each.numel % 64 == 0 for each in segments)


@FORMATS
def test_a_copy_keeps_the_names_of_parameters_that_were_moved(states: str) -> None:
    """Random bits depend on them; a name by place would be another one in the copy."""
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    optimizer = longshore.AdamW(weights, lr=0.1, offload=offload(states, 1000))
    step_by_ones(optimizer, weights)
    optimizer.param_groups[0]["params"].pop(0)
    copied, (_, *others) = copy.deepcopy((optimizer, weights))
    for each, of in ((optimizer, weights[1:]), (copied, others)):
        step_by_ones(each, of)
    assert all(torch.equal(a, b) for a, b in zip(weights[1:], others, strict=True))


@FORMATS
@pytest.mark.filterwarnings("ignore:SGD has no states")
def test_momentum_that_comes_later_beside_other_kinds_of_tiles(states: str) -> None:
    """A buffer of a master alone never takes the place of one of a momentum alone, which has as many arrays."""
    models = [[nn.Parameter(torch.ones(64, 64).to(dtype)) for dtype in THREE_KINDS] for _ in range(2)]
    together = longshore.SGD([("0", models[0][0])], lr=0.1, offload=offload(states, None))
    for name in ("1", "2"):
        together.add_param_group({"params": [(name, models[0][int(name)])]})
    apart = [longshore.SGD([(str(n), each)], lr=0.1, offload=offload(states, None)) for n, each in enumerate(models[1])]
    for momentum in (0.0, 0.0, 0.9, 0.9):
        for optimizer in (together, *apart):
            for group in optimizer.param_groups:
                group["momentum"] = momentum
            step_by_ones(optimizer, [each for group in optimizer.param_groups for each in group["params"]])
    for first, second, optimizer in zip(*models, apart, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(together.state[first]["momentum_buffer"], optimizer.state[second]["momentum_buffer"])


def test_a_step_count_that_a_float32_rule_does_not_keep_is_not_its_own() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    encoded = longshore.SGD([weight], lr=0.1, momentum=0.9, offload=offload("bf16", None))
    step_by_ones(encoded, [weight])
    other = nn.Parameter(torch.ones(64, 64))
    plain = longshore.SGD([other], lr=0.1, momentum=0.9)
    plain.load_state_dict(encoded.state_dict())
    step_by_ones(plain, [other])
    assert plain.state[other]["momentum_buffer"].unique().tolist() == [pytest.approx(1.9)]


THREE_KINDS = (torch.float32, torch.bfloat16, torch.float32)


def step_by_ones(optimizer: Any, weights: list[nn.Parameter]) -> None:
    for each in weights:
        each.grad = torch.ones_like(each)
    optimizer.step()
