"""Muon: the weights of torch.optim.Muon, and of AdamW for what is no matrix, in a plain loop."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from plain_muon import Model, PlainMuon, backward, build, groups_of
from support import same_weights, simulated
from torch import Tensor, nn

import longshore
from longshore.checkpoint.optimizer_state import OptimizerState

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain_of(model: Model, **options: Any) -> PlainMuon:
    groups = groups_of(model)
    groups[-1] |= {"betas": (0.9, 0.999), "eps": 1e-8}
    return PlainMuon(groups, **{"lr": 0.02, **options})


KINDS: dict[str, dict[str, Any]] = {
    "in_place": {},
    "released": {"release_gradients": True},
    "copied": {"offload": simulated(tile_numel=300)},
    "copied_in_one_tile": {"offload": simulated(tile_numel=1 << 20)},
    "copied_and_released": {"release_gradients": True, "offload": simulated(tile_numel=300)},
    "most_on_the_device": {"offload": replace(simulated(tile_numel=300), ratio=0.5)},
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_the_plain_loop(dtype: torch.dtype, kind: str) -> None:
    plain_model, model = build(dtype), build(dtype)
    plain = plain_of(plain_model)
    with pytest.warns(UserWarning, match=r"ratio") if kind == "most_on_the_device" else contextlib.nullcontext():
        optimizer = longshore.Muon(groups_of(model), lr=0.02, **KINDS[kind])
    gradients: dict[nn.Parameter, Tensor] = {}
    for step in range(6):
        for backwards in range(1 + step % 2):
            for each in (plain_model, model):
                backward(each, 10 * step + backwards)
            if "released" in kind:  # later gradients are added in float32
                _add(gradients, plain_model)
        if "released" in kind:
            plain.step(gradients)
            gradients.clear()
        else:
            plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert torch.equal(optimizer.state[model.tall.weight]["momentum_buffer"], plain.momentum(plain_model.tall.weight))
    assert list(optimizer.state[model.tall.weight]) == ["momentum_buffer", *["master"] * (dtype != torch.float32)]
    assert list(optimizer.state[model.norm.weight])[:3] == ["step", "exp_avg", "exp_avg_sq"]


def _add(gradients: dict[nn.Parameter, Tensor], model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        former = gradients.get(parameter)
        gradients[parameter] = parameter.grad.float() if former is None else former + parameter.grad.float()
        parameter.grad = None


@pytest.mark.parametrize("kind", ["in_place", "copied_and_released"])
def test_clipping_comes_before_the_momentum_and_counts_all_gradients(kind: str) -> None:
    """DeepSpeed #8439: each update was divided by its own norm."""
    plain_model, model = build(), build()
    plain = plain_of(plain_model)
    optimizer = longshore.Muon(groups_of(model), lr=0.02, **KINDS[kind])
    for step in range(4):
        for each in (plain_model, model):
            backward(each, step)
        norm = optimizer.clip_grad_norm_(0.5)
        assert norm > 0.5
        gradients = [each.grad for each in plain_model.parameters() if each.grad is not None]
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients))
        plain.step_on_grads(scale=float(0.5 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step


@pytest.mark.parametrize("kind", ["in_place", "copied", "copied_and_released"])
def test_idle_matrices_keep_everything(kind: str) -> None:
    """A matrix that is used in some windows only, as experts are."""
    plain_model, model = build(torch.bfloat16), build(torch.bfloat16)
    plain = plain_of(plain_model)
    optimizer = longshore.Muon(groups_of(model), lr=0.02, **KINDS[kind])
    for step, idle in enumerate([("experts", "tall.weight"), (), ("qkv.weight", "tall.weight"), ("columns",)]):
        for each in (plain_model, model):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in idle)
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step


def test_writes_between_steps_are_seen() -> None:
    plain_model, model = build(torch.bfloat16), build(torch.bfloat16)
    plain = plain_of(plain_model)
    optimizer = longshore.Muon(groups_of(model), lr=0.02, offload=simulated(tile_numel=300))
    for step in range(4):
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        for each in (plain_model, model):
            each.wide.weight.data.clamp_(-0.1, 0.1)
            each.experts.data[1].mul_(0.5)
        plain.refresh_all()  # what was not written keeps its digits
    assert same_weights(plain_model, model)


def test_schedulers_and_options_of_groups_count_at_each_step() -> None:
    plain_model, model = build(), build()
    plain = plain_of(plain_model)
    optimizer = longshore.Muon(groups_of(model), lr=0.02)
    for step in range(4):
        for each in (plain_model, model):
            backward(each, step)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        muon = plain.muon.param_groups
        for ours, theirs in zip(optimizer.param_groups, [*muon, plain.others.optimizer.param_groups[0]], strict=True):  # pyright: ignore
            ours["lr"] = theirs["lr"] = theirs["lr"] * 0.7
        optimizer.param_groups[0]["momentum"] = muon[0]["momentum"] = 0.5
        optimizer.param_groups[1]["ns_steps"] = muon[1]["ns_steps"] = 3
        optimizer.param_groups[2]["eps"] = muon[2]["eps"] = 10.0
    assert same_weights(plain_model, model)


# -- state --------------------------------------------------------------------


def simple(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(9, 20, bias=False), nn.Tanh(), nn.Linear(20, 9, bias=False)).to(dtype)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 9, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("to_torch", [False, True])
def test_states_go_to_torchs_muon_and_come_from_it(to_torch: bool) -> None:
    model, other, straight = simple(), simple(), simple()
    kinds = (longshore.Muon, torch.optim.Muon) if to_torch else (torch.optim.Muon, longshore.Muon)
    first = kinds[0](model.parameters(), lr=0.02)
    whole = torch.optim.Muon(straight.parameters(), lr=0.02)
    for step in range(6):
        step_on(straight, whole, step)
    for step in range(3):
        step_on(model, first, step)
    second = kinds[1](other.parameters(), lr=7.0)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(model.state_dict())
    for step in range(3, 6):
        step_on(other, second, step)
    assert same_weights(straight, other)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_whole_state_goes_on(how: str) -> None:
    model, straight = build(torch.bfloat16), build(torch.bfloat16)
    ours, whole = (longshore.Muon(groups_of(each), lr=0.02) for each in (model, straight))
    for step in range(4):
        backward(straight, step)
        whole.step()
        whole.zero_grad()
    for step in range(2):
        backward(model, step)
        ours.step()
        ours.zero_grad()
    if how == "state_dict":
        again = longshore.Muon(groups_of(model), lr=5.0)
        again.load_state_dict(ours.state_dict())
    else:
        both = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}[how]
        model, again = both((model, ours))
    for step in range(2, 4):
        backward(model, step)
        again.step()
        again.zero_grad()
    assert same_weights(straight, model)
    assert [group["use_muon"] for group in again.param_groups] == [True] * 5 + [False]


def test_an_edited_momentum_counts() -> None:
    plain_model, model = simple(), simple()
    plain, ours = torch.optim.Muon(plain_model.parameters(), lr=0.02), longshore.Muon(model.parameters(), lr=0.02)
    for step in range(4):
        for each, optimizer in ((plain_model, plain), (model, ours)):
            step_on(each, optimizer, step)
            optimizer.state[each[0].weight]["momentum_buffer"].mul_(0.3)
    assert same_weights(plain_model, model)


def test_host_memory_is_that_of_master_and_momentum() -> None:
    model = build(torch.bfloat16)
    optimizer = longshore.Muon(groups_of(model), lr=0.02, offload=simulated())
    backward(model, 0)
    optimizer.step()
    tier = optimizer._core.members.store.tiles.tier
    numels = {True: 0, False: 0}
    for tile in tier.tiles:
        numels[tile.arrays.of_matrices] += tile.layout.buffer_numel
    assert optimizer.host_bytes()["state"] == 8 * numels[True] + 12 * numels[False]
    largest = max(each.numel() for each in (model.qkv.weight, model.experts, model.tall.weight))
    assert optimizer.host_bytes()["staging"] - tier.slots.passing_bytes == 2 * 2 * largest


@pytest.mark.parametrize("kind", ["in_place", "copied_and_released"])
def test_a_snapshot_is_of_its_moment(kind: str) -> None:
    """As a checkpoint that is written while training goes on reads it."""
    model, other = build(torch.bfloat16), build(torch.bfloat16)
    optimizer, same = (longshore.Muon(groups_of(each), lr=0.02, **KINDS[kind]) for each in (model, other))
    for each, of in ((model, optimizer), (other, same)):
        backward(each, 0)
        of.step()
        of.zero_grad()
    members = optimizer._core.members
    reads = [
        (record.index, name) for record in members.records if record.matrices for name in ("momentum_buffer", "master")
    ]
    before = {read: members.store.states.read(*read) for read in reads}
    snapshot = members.store.states.ranges.snapshot(reads, 1 << 20)
    for each, of in ((model, optimizer), (other, same)):
        for step in (1, 2):
            backward(each, step)
            of.step()
            of.zero_grad()
    assert all(torch.equal(snapshot.read_range(*read), before[read]) for read in reads)
    assert not any(torch.equal(members.store.states.read(*read), before[read]) for read in reads)
    snapshot.close()
    assert same_weights(model, other)


# -- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"parameter here is \[3\], and Muon steps matrices: put it into a group with use_muon=False"),
        ((2, 3, 4), {}, r"split='stack'"),
        ((4, 3), {"split": "stack"}, "for three dimensions"),
        ((4, 3), {"split": 3}, "cannot be divided into 3 equal blocks"),
        ((4, 3), {"split": [1, 2]}, r"blocks of \[1, 2\] are not its dimension 0"),
        ((4, 3), {"split": [1, 2], "split_dim": 1}, "all of one size"),
        ((4, 3), {"split": "rows"}, "'stack', not 'rows'"),
        ((4, 3), {"split": True}, "not True"),
        ((4, 3), {"split": np.array([2, 2])}, r"sizes, or 'stack', not array\(\[2, 2\]\)"),
        ((4, 3), {"split": 2, "split_dim": 2}, "split_dim is 0 or 1"),
        ((4, 3), {"ns_steps": 100}, "ns_steps must be at least 0 and below 100"),
        ((4, 3), {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is three numbers"),
        (
            (4, 3),
            {"ns_coefficients": (1.0, -1e39, 2.0)},
            r"ns_coefficients must be from -3\.4.*float32 can hold",
        ),
        ((4, 3), {"eps": 3.4e38}, r"eps must be from -3\.38.*bfloat16 can hold, and is 3\.4"),
        ((4, 3), {"adjust_lr_fn": "spectral"}, "'match_rms_adamw', not 'spectral'"),
        ((4, 3), {"momentum": -0.1}, "momentum must be a number of at least 0"),
    ],
)
def test_refused(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        longshore.Muon([{"params": [("here", parameter)], **options}])
    good = longshore.Muon([("good", nn.Parameter(torch.ones(2, 2)))])
    with pytest.raises(ValueError, match=message):
        good.add_param_group({"params": [("here", parameter)], **options})
    assert len(good.param_groups) == 1


def test_a_matrix_that_changes_its_group_or_its_blocks_is_refused() -> None:
    model = build()
    optimizer = longshore.Muon(groups_of(model), lr=0.02)
    optimizer.param_groups[1]["split"] = 2
    backward(model, 0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(longshore.ParameterError, match=r"was laid out as 3 matrices of \[24, 24\].* now"):
        optimizer.step()
    optimizer.param_groups[1]["split"] = 3
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[-1]["params"].append(moved)
    with pytest.raises(longshore.ParameterError, match="makes it no matrix now"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_state_of_the_other_kind_is_refused() -> None:
    model = simple()
    muon = longshore.Muon(model.parameters(), lr=0.02)
    adamw = longshore.Muon([{"params": list(simple().parameters()), "use_muon": False}])
    with pytest.raises(ValueError, match=r"has no momentum.*: it is another optimizer's"):
        muon.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match=r"has no momentum.*: it is another optimizer's"):
        muon.load_state_dict(longshore.AdamW(simple().parameters()).state_dict())


def test_a_state_whose_group_says_another_kind_is_refused() -> None:
    muon = longshore.Muon(simple().parameters(), lr=0.02)
    saved = muon.state_dict()
    saved["param_groups"][0] |= {"use_muon": False, "betas": (0.9, 0.999)}
    with pytest.raises(ValueError, match="use_muon=False, and this optimizer's has use_muon=True"):
        muon.load_state_dict(saved)


def test_torchs_muon_is_taken_over() -> None:
    model, straight = simple(), simple()
    plain = torch.optim.Muon(model.parameters(), lr=0.02)
    step_on(model, plain, 0)
    again = longshore.from_client(plain)
    assert isinstance(again, longshore.Muon)
    whole = torch.optim.Muon(straight.parameters(), lr=0.02)
    step_on(straight, whole, 0)
    for step in range(1, 3):
        step_on(model, again, step)
        step_on(straight, whole, step)
    assert same_weights(straight, model)


def test_adamw_groups_have_adamws_defaults_and_nothing_of_muons() -> None:
    model = build()
    optimizer = longshore.Muon(
        [{"params": [model.tall.weight]}, {"params": [model.norm.weight], "use_muon": False}], lr=0.5, weight_decay=0.7
    )
    adamw = longshore.AdamW([nn.Parameter(torch.ones(2))]).param_groups[0]
    ours = {name: value for name, value in optimizer.param_groups[1].items() if name not in ("params", "use_muon")}
    assert ours == {name: value for name, value in adamw.items() if name != "params"}


def test_a_failed_transformation_breaks_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The momentum has been stepped by then; nothing goes on as if it had not."""
    model = simple()
    optimizer = longshore.Muon(model.parameters(), lr=0.02)
    step_on(model, optimizer, 0)
    monkeypatch.setattr("longshore.optim.rules.muon.newton_schulz", _fail)
    model(torch.ones(1, 9)).sum().backward()
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    monkeypatch.undo()
    with pytest.raises(longshore.BrokenStateError):
        optimizer.step()


def _fail(*_: object) -> Tensor:
    raise RuntimeError("no memory")


def test_empty_and_thin_matrices() -> None:
    torch.manual_seed(0)
    shapes = ((0, 4), (1, 7), (7, 1), (1, 1), (300, 2))
    plain_parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters = [nn.Parameter(each.detach().clone()) for each in plain_parameters]
    plain, ours = torch.optim.Muon(plain_parameters[1:], lr=0.1), longshore.Muon(parameters, lr=0.1)
    for step in range(3):
        for one, other in zip(plain_parameters, parameters, strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        plain.step()
        ours.step()
    for one, other in zip(plain_parameters, parameters, strict=True):
        assert torch.equal(one, other)


# -- the usual groups ---------------------------------------------------------


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.block = nn.ModuleDict({"qkv": nn.Linear(8, 24), "up": nn.Linear(8, 16), "norm": nn.LayerNorm(8)})
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_the_usual_groups(tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = Language(tied)
    split = {"*.qkv.weight": 3, "experts": "stack"}
    groups = longshore.muon_groups(model, split=split, muon={"lr": 0.02}, adamw={"lr": 1e-3, "weight_decay": 0.1})
    tables = ["tokens.weight"] if tied else ["tokens.weight", "lm_head.weight"]
    vectors = ["block.qkv.bias", "block.up.bias", "block.norm.weight", "block.norm.bias"]
    assert [[name for name, _ in group.pop("params")] for group in map(dict, groups)] == [
        ["experts"],
        ["block.qkv.weight"],
        ["block.up.weight"],
        tables,
        vectors,
    ]
    assert [{name: value for name, value in group.items() if name != "params"} for group in groups] == [
        {"use_muon": True, "lr": 0.02, "split": "stack"},
        {"use_muon": True, "lr": 0.02, "split": 3},
        {"use_muon": True, "lr": 0.02},
        {"use_muon": False, "lr": 1e-3, "weight_decay": 0.1},
        {"use_muon": False, "lr": 1e-3, "weight_decay": 0.0},
    ]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    assert printed[0].split() == ["Muon", "1", "tensors", "128", "elements", "(lr=0.02,", "split=stack)", "experts"]
    longshore.Muon(groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"parameter experts is \[2, 8, 8\]: a stack of matrices"),
        ({"split": {"experts": "stack"}}, r"block.qkv.weight, \[24, 8\], looks as if it held several matrices"),
        ({"split": {"experts": "stack", "*qkv.weight": 5}}, "cannot be divided into 5 equal blocks"),
        ({"others": ["*.nothing"]}, r"'\*.nothing' is the name of no trained parameter"),
    ],
)
def test_what_muon_groups_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longshore.muon_groups(Language(False), show=False, **options)


def test_what_looks_fused_may_be_one_matrix_or_adamws(capsys: pytest.CaptureFixture[str]) -> None:
    groups = longshore.muon_groups(Language(False), split={"*qkv*t": None}, others=["experts"], show=False)
    assert [[name for name, _ in group["params"]] for group in groups[:2]] == [
        ["block.qkv.weight", "block.up.weight"],
        ["experts", "tokens.weight", "lm_head.weight"],
    ]
    assert capsys.readouterr().out == ""


# -- what others may do to it -------------------------------------------------


def two_matrices(**options: Any) -> tuple[nn.Sequential, longshore.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False))
    return model, longshore.Muon([{"params": [each.weight], **options} for each in model])  # pyright: ignore


def stepped(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_under_autocast_is_refused(dtype: torch.dtype) -> None:
    """It would choose the dtype of Newton-Schulz, and on another thread not."""
    model, optimizer = two_matrices()
    before = [each.detach().clone() for each in model.parameters()]
    with torch.autocast("cpu", dtype), pytest.raises(longshore.ParameterError, match=r"0\.0.*inside torch.autocast"):
        stepped(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()  # outside of it


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": np.float32(0.1)}, TypeError, "lr is a number of Python's"),
        ({"weight_decay": torch.tensor(0.1)}, TypeError, "weight_decay is a number of Python's"),
        ({"momentum": torch.tensor(0.1)}, TypeError, "momentum is a number of Python's"),
        ({"momentum": 1.5}, ValueError, "at most 1"),
        ({"use_muon": "False"}, TypeError, "use_muon is True or False"),
        ({"use_muon": None}, TypeError, "use_muon is True or False"),
        ({"split": [4.0, 8.0]}, ValueError, "sizes of blocks are integers"),
        ({"split": (True, 11)}, ValueError, "sizes of blocks are integers"),
        ({"split": []}, ValueError, "sizes of blocks are integers"),
        ({"split": 2, "split_dim": 1.0}, ValueError, "split_dim is 0 or 1"),
    ],
)
def test_values_that_would_be_silently_different(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        two_matrices(**options)


def test_a_transposed_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous in memory"):
        longshore.Muon([nn.Parameter(torch.ones(4, 8).t())])


def test_unknown_options_of_the_groups() -> None:
    model, _ = two_matrices()
    for arguments in ({"split": {"0.weight": {"split": 2, "dim": 1}}}, {"muon": {"momentun": 0.5}}):
        with pytest.raises(ValueError, match=r"dim|momentun"):
            longshore.muon_groups(model, **arguments)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("before", [0, 4])
def test_a_schedule_that_cycles_momentum_is_refused(before: int, use_muon: bool) -> None:
    """From the first step on, or in mid-run; with matrices, and with AdamW's groups alone."""
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "use_muon": use_muon}, {"params": [model.bias], "use_muon": False}]
    optimizer = longshore.Muon(groups)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    for _ in range(before):
        step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    with pytest.raises(ValueError, match="cycle_momentum=False"):
        step()


def test_use_muon_of_a_group_is_changed() -> None:
    model, optimizer = two_matrices()
    optimizer.param_groups[1]["use_muon"] = False
    with pytest.raises(ValueError, match=r"use_muon=False has no betas.*built anew"):
        stepped(model, optimizer)


@pytest.mark.parametrize(("saved", "own"), [({"split": 2}, {}), ({}, {"split": 2}), ({"split": 2}, {"split": 4})])
def test_the_own_split_counts(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Momentum is elementwise, so a state fits every division."""
    (model, optimizer), (other, loading) = two_matrices(**saved), two_matrices(**own)
    stepped(model, optimizer)
    stepped(other, loading)
    told = rf"group 0 was saved with split={saved.get('split')}, and this optimizer has split={own.get('split')}, which"
    with pytest.warns(UserWarning, match=told):
        loading.load_state_dict(optimizer.state_dict())
    assert [group.get("split") for group in loading.param_groups] == [own.get("split")] * 2
    stepped(other, loading)
    momentum = loading.state[other[0].weight]["momentum_buffer"]
    assert momentum.shape == (12, 8)


def test_a_checkpoint_of_another_division(tmp_path: Path) -> None:
    """Nothing is loaded, and training goes on."""
    model, optimizer = two_matrices()
    stepped(model, optimizer)
    longshore.save(tmp_path, model, optimizer)
    first, second = (each.weight for each in model)
    optimizer.close()
    moved = longshore.Muon([{"params": [first]}, {"params": [second], "use_muon": False}])
    with pytest.raises(longshore.CheckpointError, match=r"1\.weight was stepped by another rule"):
        longshore.load(tmp_path, model, moved)
    stepped(model, moved)


def test_a_checkpoint_from_another_kind_of_device(tmp_path: Path) -> None:
    """It goes on, and says that products of matrices have other bits there."""
    model, optimizer = two_matrices()
    stepped(model, optimizer)
    longshore.save(tmp_path / "here", model, optimizer)
    with mock.patch.object(OptimizerState, "_matrices_on", return_value="cuda"):
        longshore.save(tmp_path / "there", model, optimizer)
    longshore.load(tmp_path / "here", model, optimizer)  # without a warning
    with pytest.warns(UserWarning, match="made orthogonal on cuda, and here it is on cpu"):
        longshore.load(tmp_path / "there", model, optimizer)
    stepped(model, optimizer)


def test_names_of_other_models() -> None:
    """As in BERT, blocks may have a module called output; recurrent layers stack their gates; a column is a vector."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Sequential(nn.Linear(8, 8, bias=False))
            self.scale = nn.Parameter(torch.ones(8, 1))

    model = nn.Module()
    model.layer = nn.ModuleList([Layer()])
    model.output = nn.Linear(8, 8, bias=False)
    matrices, others = longshore.muon_groups(model, show=False)
    assert [name for name, _ in matrices["params"]] == ["layer.0.output.0.weight"]
    assert [name for name, _ in others["params"]] == ["layer.0.scale", "output.weight"]
    with pytest.raises(ValueError, match=r"weight_ih_l0, \[16, 4\], looks as if it held several"):
        longshore.muon_groups(nn.LSTM(4, 4), show=False)


@pytest.mark.parametrize("other", [longshore.SGD, torch.optim.SGD])
def test_states_of_momentum_that_is_another(other: Any) -> None:
    """SGD adds gradients up, and Muon averages them, under the same name."""
    model, optimizer = two_matrices()
    sgd = other([{"params": [each.weight]} for each in model], lr=0.1, momentum=0.9)
    stepped(model, sgd)
    with pytest.raises(ValueError, match="group 0 of the state has no ns_steps: it is another optimizer's"):
        optimizer.load_state_dict(sgd.state_dict())
    ours = longshore.SGD([{"params": [each.weight]} for each in model], lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    with pytest.raises(ValueError, match="group 0 of the state has ns_steps: it is Muon's"):
        ours.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"others": "*"}, TypeError, r"others is a list of patterns, such as \['\*'\]"),
        ({"muon": 0.02}, TypeError, "muon is a dictionary, not 0.02"),
        ({"split": ["qkv.weight"]}, TypeError, "split is a dictionary"),
        ({"split": {"qvk.weight": 3}}, ValueError, "and there is qkv.weight"),
        ({"split": {"norm.*": 3}}, ValueError, r"'norm\.\*' is the name of no trained parameter"),
        (
            {"split": {"experts": "stack", "qkv.weight": 3}, "others": ["exp*"]},
            ValueError,
            r"parameter experts has a split in longshore.muon_groups\(\), .* and others=\['exp\*'\] leaves it to AdamW",
        ),
        ({"split": {"experts*": 2}}, ValueError, r"split=\{'experts\*': ...\} in longshore.muon_groups\(\) fits it"),
    ],
)
def test_what_muon_groups_cannot_read(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        longshore.muon_groups(build(), show=False, **given)


def test_muon_groups_of_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"a torch.nn.Module, not generator"):
        longshore.muon_groups(build().parameters())  # pyright: ignore[reportArgumentType]


def test_a_pattern_with_a_star_leaves_biases_out() -> None:
    model = nn.Sequential(nn.Linear(4, 12))
    (matrices, rest) = longshore.muon_groups(model, split={"0.*": 3}, show=False)
    assert matrices["split"] == 3 and [name for name, _ in rest["params"]] == ["0.bias"]


@pytest.mark.parametrize(("wrong", "right"), [("spilt", "split"), ("momentun", "momentum")])
def test_options_of_groups_that_are_nearly_right(wrong: str, right: str) -> None:
    with pytest.warns(UserWarning, match=f"a group has '{wrong}', which is no option; '{right}' is one"):
        longshore.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], wrong: 2}])


@pytest.mark.parametrize("name", ["max_momentum", "base_momentum", "tag"])
def test_what_others_keep_in_groups(name: str) -> None:
    """Such as a schedule, whose groups are taken over."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longshore.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], name: 0.9}])
