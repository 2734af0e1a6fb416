"""A client's own optimizer in our place: the same weights, or a refusal by name."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    KIND_NAMES,
    KINDS,
    Kind,
    PlainLoop,
    loss_of,
    model_of_sixteens,
    same_weights,
    simulated,
    small_model,
    twins,
)
from torch import Tensor, nn

import longshore
from longshore.engine.optimizers import from_client

TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("ASGD", {"lr": 1e-2, "t0": 2, "weight_decay": 0.1}),
    ("Adadelta", {"lr": 0.5, "weight_decay": 0.1}),
    ("Adamax", {"lr": 1e-2, "betas": (0.8, 0.9), "maximize": True}),
    ("NAdam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("RMSprop", {"lr": 1e-2, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 1e-2}),
]
IDS = [f"{name}-{len(options)}" for name, options in TORCHS]
EVERY_TORCH = pytest.mark.parametrize(("kind", "options"), TORCHS, ids=IDS)
MODES = pytest.mark.parametrize("release", [False, True])


def converted(optimizer: torch.optim.Optimizer, release: bool = False, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_client(optimizer, release_gradients=release, **settings)


def clients(kind: str, parameters: Any, options: dict[str, Any], **settings: Any) -> Any:
    return converted(getattr(torch.optim, kind)(parameters, **options), **settings)


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@EVERY_TORCH
@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("transfer", "tile_numel"), [("direct", 7), ("simulated", 100), ("direct", 1 << 22)])
def test_torchs_elementwise_optimizers_on_host_tiles(
    kind: str, options: dict[str, Any], release: bool, dtype: torch.dtype, transfer: str, tile_numel: int
) -> None:
    offload = simulated(tile_numel=tile_numel) if transfer == "simulated" else longshore.Offload(tile_numel=tile_numel)
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), getattr(torch.optim, kind), **options)
    optimizer = clients(kind, model.parameters(), options, release=release, offload=offload)
    for step in range(5):
        for each in (plain_model, model):
            loss_of(each, step, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    for index, parameter in enumerate(model.parameters()):
        theirs = plain.optimizer.state[plain.masters[index]]
        assert {*optimizer.state[parameter]} - {"master"} == {*theirs}
        for name, value in theirs.items():
            expected = value if value.dim() == 0 else plain.state(index, name)
            assert torch.equal(optimizer.state[parameter][name], expected), name


def _as_tensors(value: Any) -> Any:
    return tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)


@EVERY_TORCH
def test_options_that_are_tensors(kind: str, options: dict[str, Any]) -> None:
    """torch then computes with them in their dtype. (256 elements: torch's loops have no scalar tail.)"""
    make = getattr(torch.optim, kind)
    values = {**make([torch.zeros(1)]).defaults, **options}
    numeric = [name for name, value in values.items() if isinstance(value, (float, tuple))]
    assert "lr" in numeric
    for option in numeric:
        theirs, ours = (nn.Parameter(torch.linspace(-1, 1, 256)) for _ in range(2))
        tensors = [{**options, option: _as_tensors(values[option])} for _ in range(2)]
        plain, optimizer = make([theirs], **tensors[0], foreach=False), clients(kind, [ours], tensors[1])
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (plain, optimizer)]
        for step in range(4):
            for each, stepped, scheduler in zip((theirs, ours), (plain, optimizer), schedulers, strict=True):
                each.grad = torch.randn(256, generator=torch.Generator().manual_seed(step))
                stepped.step()
                scheduler.step()
            assert torch.equal(theirs, ours), (option, step)


@EVERY_TORCH
def test_a_learning_rate_that_is_a_tensor_in_an_engine_and_its_checkpoint(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def engine_of(model: nn.Module, rate: float) -> Any:
        client = getattr(torch.optim, kind)(model.parameters(), **{**options, "lr": torch.tensor(rate)})
        config = {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.0}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"torch\.optim\.\w+ has no kernel in longshore")
            return longshore.initialize(model=model, optimizer=client, config=config)[0]

    rate = torch.tensor(0.1 + options["lr"])
    theirs, ours = sixteens(), sixteens()
    plain = getattr(torch.optim, kind)(theirs.parameters(), **{**options, "lr": rate}, foreach=False)
    engine = engine_of(ours, 0.1 + options["lr"])
    try:
        for step in range(4):
            if step == 2:
                engine.save_checkpoint(str(tmp_path), tag="half")
                engine.destroy()
                engine = engine_of(ours := sixteens(1), 1.0)
                engine.load_checkpoint(str(tmp_path), tag="half")
            train(theirs, plain, range(step, step + 1))
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).pow(2).sum())
            engine.step()
            for optimizer in (plain, engine.optimizer):
                optimizer.param_groups[0]["lr"].mul_(0.7)
            assert same_weights(theirs, ours), step
    finally:
        engine.destroy()


def test_neither_the_cut_nor_torchs_threads_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More elements than a buffer has, and a length that leaves a tail for torch's own loops."""
    seen, whole = set(), torch.optim.RMSprop.step
    monkeypatch.setattr(torch.optim.RMSprop, "step", lambda self: (seen.add(torch.get_num_threads()), whole(self)))
    numel, results = 100_003, []
    values, gradients = torch.randn(numel), [torch.randn(numel) for _ in range(3)]
    for tile_numel, threads in ((1 << 22, 1), (12_345, 1), (1 << 22, 3)):
        parameter = nn.Parameter(values.clone())
        optimizer = clients("RMSprop", [parameter], {}, offload=longshore.Offload(tile_numel=tile_numel))
        try:
            torch.set_num_threads(threads)
            for gradient in gradients:
                parameter.grad = gradient.clone()
                optimizer.step()
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
        results.append(parameter.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert seen == {1}


def test_a_state_that_was_set_before_the_first_step_counts() -> None:
    theirs, ours = (nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    plain, optimizer = torch.optim.RMSprop([theirs], foreach=False), clients("RMSprop", [ours], {})
    plain.state[theirs] = {"step": torch.tensor(0.0), "square_avg": torch.full((64,), 3.0)}
    optimizer.state[ours]["square_avg"] = torch.full((64,), 3.0)
    theirs.grad, ours.grad = torch.ones(64), torch.ones(64)
    plain.step()
    optimizer.step()
    assert torch.equal(theirs, ours)


@MODES
def test_groups_clipping_and_idle_parameters(release: bool) -> None:
    plain_model, model = twins()

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": list(of[0].parameters()), "momentum": 0.9},
            {"params": list(of[2].parameters()), "lr": 3e-2},
            {"params": list(of[3].parameters()), "centered": True},
        ]

    plain = PlainLoop(groups(plain_model), torch.optim.RMSprop)
    optimizer = clients("RMSprop", groups(model), {}, release=release, offload=simulated(tile_numel=1 << 20))
    for step in range(5):
        for each in (plain_model, model):
            each[2].requires_grad_(step % 2 == 1)
            loss_of(each, step).backward()
        norm = optimizer.clip_grad_norm_(0.5)
        plain.step_on_grads(scale=torch.clamp(0.5 / (norm + 1e-6), max=1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    kept = [{*optimizer.state[parameter]} - {"step"} for parameter in model.parameters()]
    assert kept[::2] == [{"square_avg", "momentum_buffer"}, {"square_avg"}, {"square_avg", "grad_avg"}]
    assert [float(optimizer.state[parameter]["step"]) for parameter in model.parameters()] == [5, 5, 2, 2, 5, 5]


def sixteens(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 32, generator=generator)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@EVERY_TORCH
def test_training_goes_on_and_back_to_torch(kind: str, options: dict[str, Any]) -> None:
    """In mid-training to us, and with our state back to torch; resumed from it, too."""
    plain_model, model, other = sixteens(), sixteens(), sixteens(1)
    make = getattr(torch.optim, kind)
    theirs = make(plain_model.parameters(), **options, foreach=False)
    client = make(model.parameters(), **options, foreach=False)
    train(plain_model, theirs, range(2))
    train(model, client, range(2))
    optimizer = converted(client, offload=simulated(tile_numel=1000))
    train(plain_model, theirs, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert same_weights(plain_model, model)
    back = make(other.parameters(), foreach=False)
    other.load_state_dict(model.state_dict())
    back.load_state_dict(optimizer.state_dict())
    resumed_model = sixteens(2)
    resumed = clients(kind, resumed_model.parameters(), {})
    resumed.load_state_dict(optimizer.state_dict())
    resumed_model.load_state_dict(model.state_dict())
    for each, stepper in ((plain_model, theirs), (other, back), (resumed_model, resumed)):
        train(each, stepper, range(4, 6))
        assert same_weights(plain_model, each)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "Lion"], ids=lambda kind: kind.name)
@pytest.mark.parametrize("steps", [0, 2])
@MODES
def test_torchs_optimizers_with_kernels_become_ours(kind: Kind, steps: int, release: bool) -> None:
    plain_model, model = sixteens(), sixteens()
    options: dict[str, Any] = {**kind.options, "fused": True}
    theirs, client = (kind.plain()(each.parameters(), **options) for each in (plain_model, model))
    for optimizer in (theirs, client):
        torch.optim.lr_scheduler.StepLR(optimizer, 2)  # leaves initial_lr in the groups
    for each, optimizer in ((plain_model, theirs), (model, client)):
        train(each, optimizer, range(steps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = from_client(client, release_gradients=release, offload=simulated(tile_numel=1000))
    assert type(ours) is getattr(longshore, kind.name)
    assert ours.param_groups[0]["initial_lr"] == kind.options["lr"]
    train(plain_model, theirs, range(steps, 4))
    train(model, ours, range(steps, 4))
    assert same_weights(plain_model, model)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_ours_move_with_their_state(kind: Kind) -> None:
    plain_model, model = twins(torch.bfloat16)
    plain = kind.loop(plain_model.parameters())
    first = kind.make(model.named_parameters(), release_gradients=True)
    optimizer: Any = first
    for step in range(5):
        if step == 3:
            optimizer = from_client(first, release_gradients=True, offload=simulated(tile_numel=100))
            assert isinstance(first, type(optimizer)) and optimizer is not first
            assert optimizer.param_groups[0]["param_names"] == first.param_groups[0]["param_names"]
        for each in (plain_model, model):
            loss_of(each, step, torch.bfloat16).backward()
        plain.step_on_grads()
        optimizer.step()
        assert same_weights(plain_model, model), step


def test_names_of_the_model_are_those_of_errors() -> None:
    model = small_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    client = torch.optim.AdamW(model.parameters())
    optimizer = from_client(client, release_gradients=False, names=names)
    model[2].weight.grad = torch.zeros(33).to_sparse()
    with pytest.raises(longshore.GradientError, match=r"parameter 2\.weight"):
        optimizer.step()


@pytest.mark.parametrize("named", ["by the model", "by the user"])
def test_an_empty_group_has_no_names_and_stays(named: str) -> None:
    """As transformers' Trainer makes one for biases that an adapter has not."""
    model = nn.Linear(3, 2)
    groups = [{"params": []}, {"params": list(model.parameters())}, {"params": []}]
    names = {id(parameter): name for name, parameter in model.named_parameters()} if named == "by the model" else None
    client = torch.optim.AdamW(groups)
    if named == "by the user":
        client = torch.optim.AdamW([{"params": list(model.named_parameters())}])
        client.add_param_group({"params": [], "param_names": []})
    made = from_client(client, release_gradients=False, names=names)
    assert [len(group["params"]) for group in made.param_groups] == [
        len(group["params"]) for group in client.param_groups
    ]


def test_that_it_is_slower_is_said_once() -> None:
    client = torch.optim.RMSprop(small_model().parameters())
    with pytest.warns(UserWarning, match=r"torch.optim.RMSprop has no kernel in longshore") as caught:
        optimizer = from_client(client, release_gradients=False)
    assert len(caught) == 1
    optimizer.step()  # and warnings are errors here


class OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), r"torch.optim.LBFGS cannot be stepped in tiles"),
        (lambda p: torch.optim.SparseAdam(p), r"torch.optim.SparseAdam cannot be stepped in tiles"),
        (lambda p: torch.optim.Adafactor(p), r"torch.optim.Adafactor cannot be stepped in tiles"),
        (lambda p: OwnAdamW(p), r"does not know the optimizer .*OwnAdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True is not supported"),
        (lambda p: torch.optim.RAdam(p, capturable=True), "capturable=True is not supported"),
        (lambda p: torch.optim.Adamax(p, differentiable=True), "differentiable=True is not supported"),
    ],
)
def test_others_are_refused_by_name(make: Any, message: str) -> None:
    client = make([nn.Parameter(torch.ones(4, 4))])
    before = client.state_dict()
    with pytest.raises(ValueError, match=message):
        from_client(client, release_gradients=False)
    assert client.state_dict() == before


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="not list"):
        from_client([nn.Parameter(torch.ones(4))], release_gradients=False)  # pyright: ignore[reportArgumentType]


def test_torch_says_what_it_does_not_take() -> None:
    """An option changed between steps is checked before any of them."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = clients("Adamax", [parameter], {})
    optimizer.param_groups[0]["betas"] = (2.0, 0.9)
    parameter.grad = torch.ones(4)
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4))


def test_nan_and_infinity_go_where_torch_lets_them() -> None:
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38, 1e-45, 1.0] * 8)
    for kind, options in TORCHS:
        theirs, ours = (nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
        plain = PlainLoop([theirs], getattr(torch.optim, kind), **options)
        optimizer = clients(kind, [ours], options)
        for gradient in (specials, specials.flip(0)):
            theirs.grad, ours.grad = gradient.clone(), gradient.clone()
            plain.step_on_grads()
            optimizer.step()
            assert torch.equal(theirs.isnan(), ours.isnan())
            assert _same_but_nan(theirs, ours), kind


def _same_but_nan(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0))


def test_gradients_stay_by_default() -> None:
    model = small_model()
    optimizer = longshore.from_client(torch.optim.AdamW(model.parameters()))
    loss_of(model, 0).backward()
    assert type(model[0].weight.grad) is torch.Tensor
    optimizer.step()


def _trained(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("through", ["the client", "ours"])
def test_the_client_is_another_name_of_ours(through: str) -> None:
    plain_model, model = (model_of_sixteens() for _ in range(2))
    plain = torch.optim.AdamW(list(plain_model.parameters())[:2], lr=1e-2, fused=True)
    client = torch.optim.AdamW(list(model.parameters())[:2], lr=1e-2)
    groups, group = client.param_groups, client.param_groups[0]
    calls: list[Any] = []
    handle = client.register_step_post_hook(lambda *_: calls.append(None))
    ours = converted(client)
    assert ours.param_groups is groups and client.param_groups is groups and groups[0] is group
    used = client if through == "the client" else ours
    for optimizer, its in ((plain, plain_model), (used, model)):
        _trained(its, optimizer, range(2))
        optimizer.add_param_group({"params": list(its.parameters())[2:], "lr": 1e-3})
        _trained(its, optimizer, range(2, 4))
        optimizer.state[next(its.parameters())]["exp_avg"].zero_()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.1
        _trained(its, optimizer, range(4, 6))
    assert same_weights(plain_model, model)
    assert client.param_groups is ours.param_groups and isinstance(client, torch.optim.AdamW)
    assert len(calls) == 6
    handle.remove()
    _trained(model, used, range(6, 7))
    assert len(calls) == 6
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="took over from it: copy or pickle that one"):
            copied(client)


def test_what_scripts_hold_of_a_clients_state() -> None:
    """Tensors are watched as those of our own state; a saved state_dict(), which shares them, keeps its entries."""
    plain_model, model = (model_of_sixteens() for _ in range(2))
    plain, client = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain_model, model))
    for optimizer, its in ((plain, plain_model), (client, model)):
        _trained(its, optimizer, range(2))
    saved, everything = client.state_dict(), client.state
    held = [optimizer.state[next(iter(its.parameters()))] for optimizer, its in ((plain, plain_model), (client, model))]
    moments = [state["exp_avg"] for state in held]
    ours = converted(client)
    assert len(saved["state"][0]) == 3 and len(everything) == 0
    for state, moment in zip(held, moments, strict=True):
        moment.zero_()
        state["step"].fill_(7.0)
    for optimizer, its in ((plain, plain_model), (ours, model)):
        _trained(its, optimizer, range(2, 4))
    assert same_weights(plain_model, model)
    assert torch.equal(*moments) and held[1]["step"] == 9


def test_hooks_of_state_dict_do_not_change_what_is_taken_over() -> None:
    plain_model, model = (model_of_sixteens() for _ in range(2))
    plain, client = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain_model, model))
    for optimizer, its in ((plain, plain_model), (client, model)):
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "state": {}})
        _trained(its, optimizer, range(2))
    ours = from_client(client)
    for optimizer, its in ((plain, plain_model), (ours, model)):
        _trained(its, optimizer, range(2, 4))
    assert same_weights(plain_model, model)
    assert ours.state_dict()["state"] == client.state_dict()["state"] == {}  # the hook is ours now


def test_a_scaler_of_the_client_skips_and_divides() -> None:
    weights = []
    for taken in (False, True):
        parameter = nn.Parameter(torch.ones(16))
        client = torch.optim.SGD([parameter], lr=0.1, fused=True)
        if taken:
            from_client(client)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, torch.inf, 1.0):
            scaler.scale(parameter.sum() * factor).backward()
            scaler.step(client)
            scaler.update()
            client.zero_grad()
        weights.append(parameter.detach())
    assert torch.equal(*weights) and weights[0].isfinite().all()


def test_odd_clients_are_taken_over() -> None:
    """A tuple for a list of parameters, a state of a tensor in no group, defaults that a script holds."""
    model = model_of_sixteens()
    first, second, *others = model.parameters()
    client = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=1e-2, fused=True)
    client.param_groups[1]["params"] = (second,)
    foreign, defaults = nn.Parameter(torch.ones(3)), client.defaults
    client.state[foreign]["mine"] = 1
    ours = from_client(client)
    assert client.state[foreign] == {"mine": 1}
    defaults["lr"] = 5.0
    client.add_param_group({"params": others})
    assert [group["lr"] for group in ours.param_groups] == [1e-2, 1e-2, 5.0]
    _trained(model, ours, range(1))


def test_tools_take_the_other_name(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    model = small_model()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = from_client(client)
    longshore.save(tmp_path, model, client)
    longshore.load(tmp_path, model, client)
    _, wrapped = Fabric(accelerator="cpu", devices=1).setup(model, client)
    assert wrapped.param_groups is ours.param_groups
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, 0.5)
    config = longshore.Config()
    engine = longshore.initialize(model=model, optimizer=ours, lr_scheduler=schedule, config=config).engine
    try:
        engine.backward(loss_of(engine, 0))
        engine.step()
        assert [group["lr"] for group in client.param_groups] == [0.5e-2]
    finally:
        engine.destroy()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_schedule_of_the_client_sets_the_rate_that_is_stepped(when: str) -> None:
    plain_model, model = (model_of_sixteens() for _ in range(2))
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1.0, fused=True)
    client = torch.optim.AdamW(model.parameters(), lr=1.0)
    warmup = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1e-3 * step)
    theirs = warmup(plain)
    mine = warmup(client) if when == "before" else None
    ours = from_client(client)
    _trained(plain_model, plain, range(4), theirs)
    _trained(model, ours, range(4), mine or warmup(client))
    assert same_weights(plain_model, model)
    assert not same_weights(model_of_sixteens(), model)


def test_a_client_of_two_in_a_row_is_a_name_of_the_last() -> None:
    model = small_model()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = from_client(client)
    _trained(model, first, range(2))
    second = from_client(client)
    assert client.param_groups is first.param_groups is second.param_groups
    client.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model)
    _trained(model, first, range(2, 3))
    assert second.state[next(model.parameters())]["step"] == 3
    second.param_groups[0]["weight_decay"] = 0.0
    assert first.param_groups[0]["weight_decay"] == 0.0 and not same_weights(before, small_model())
