"""The default mode: the gradient is ``.grad`` as found at ``step()``."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import PlainLoop, loss_of, same_weights, simulated, small_model, twins
from torch import nn

import longshore


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_readme_loop() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-4, weight_decay=0.01)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    for step in range(5):
        for each in (plain_model, model):
            loss_of(each, step).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
    assert same_weights(plain_model, model)


def test_idle_means_untouched() -> None:
    """No gradient: the weight, the moments and the step count stay, whatever the tile's others do."""
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2, weight_decay=0.5)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    assert len(optimizer._core.members.store.tiles) == 1
    for step in range(6):
        for each in (plain_model, model):
            loss_of(each, step).backward()
            if step % 3:
                each[2].weight.grad = None
        idle = model[2].weight.detach().clone()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)
        if step % 3:
            assert torch.equal(idle, model[2].weight)
    assert optimizer.state[model[2].weight]["step"] == 2
    assert optimizer.state[model[0].weight]["step"] == 6


@pytest.mark.parametrize("edit", ["data", "replaced", "scaled in place", "noise"])
def test_whatever_was_done_to_grad_counts(edit: str) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, offload=simulated())
    for step in range(3):
        for each in (plain_model, model):
            loss_of(each, step).backward()
            generator = torch.Generator().manual_seed(step)
            for parameter in each.parameters():
                if edit == "data":
                    parameter.grad.data[0] = 3.0
                elif edit == "replaced":
                    parameter.grad = torch.full_like(parameter, 0.25)
                elif edit == "scaled in place":
                    parameter.grad.mul_(0.125)
                else:
                    parameter.grad.add_(torch.randn(parameter.shape, generator=generator))
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
    assert same_weights(plain_model, model)


def test_gradients_accumulate_when_nobody_zeroes_them() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step([parameter.grad for parameter in plain_model.parameters()])
        optimizer.step()
    assert same_weights(plain_model, model)


def test_zero_grad_to_zeros_steps_on_zero_gradients() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    for each in (plain_model, model):
        loss_of(each, 0).backward()
        each.zero_grad(set_to_none=False)
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_closure() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure) == loss_of(plain_model, 0)
    loss_of(plain_model, 0).backward()
    plain.step_on_grads()
    assert same_weights(plain_model, model)


def test_step_hooks_and_the_profiler_see_the_step() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    loss_of(model, 0).backward()
    optimizer.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_an_old_graph_cannot_run_backward_on_new_weights(staged: bool, release: bool) -> None:
    model = small_model()
    offload = simulated() if staged else None
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release, offload=offload)
    old = loss_of(model, 0)
    loss_of(model, 1).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_parameters_change_only_inside_step() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), offload=simulated(max_delay_s=0.001), release_gradients=True)
    for step in range(3):
        before = vector(model)
        loss_of(model, step).backward()
        optimizer.grad_norm()
        assert torch.equal(before, vector(model))
        optimizer.step()
        after = vector(model)
        assert not torch.equal(before, after)
        gc.collect()
        assert torch.equal(after, vector(model))


# -- kinds of parameters ------------------------------------------------------


def test_tied_unused_empty_scalar_and_transposed_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight
            self.unused = nn.Parameter(torch.randn(4))
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.temperature = nn.Parameter(torch.tensor(0.7))
            self.transposed = nn.Parameter(torch.randn(6, 9).t())
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens) @ self.transposed.t() @ self.transposed
            image = self.conv(hidden.reshape(1, 3, 6, 6).contiguous(memory_format=torch.channels_last))
            return self.head(hidden).pow(2).sum() * self.temperature + self.empty.sum() + image.sum()

    plain_model, model = Odd(), Odd()
    assert not model.transposed.is_contiguous()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizers = [plain, longshore.AdamW(model.named_parameters(), lr=1e-2, offload=simulated(tile_numel=50))]
    for step in range(4):
        tokens = torch.randint(11, (18,), generator=torch.Generator().manual_seed(step))
        for each in (plain_model, model):
            each(tokens).backward()
        plain.step_on_grads()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert same_weights(plain_model, model)
    assert model.unused not in optimizers[1].state
    assert optimizers[1].state[model.empty]["step"] == 4
    assert optimizers[1].state[model.empty]["exp_avg"].shape == (0, 5)
    assert not model.transposed.is_contiguous()
    first, second = plain.moments([p is plain_model.transposed for p in plain.parameters].index(True))
    state = optimizers[1].state[model.transposed]
    assert torch.equal(state["exp_avg"], first) and torch.equal(state["exp_avg_sq"], second)


def test_frozen_parameters_take_no_host_memory_and_may_have_any_dtype() -> None:
    base = nn.Parameter(torch.arange(10_000, dtype=torch.uint8), requires_grad=False)
    frozen = nn.Parameter(torch.randn(10_000, dtype=torch.float64), requires_grad=False)
    adapter = nn.Parameter(torch.randn(32))
    optimizer = longshore.AdamW([base, frozen, adapter])
    (adapter.sum() + frozen.sum()).backward()
    optimizer.step()
    assert optimizer.host_bytes() == {"state": 8 * 32, "gradients": 0, "spares": 0, "staging": 0, "accumulators": 0}


def test_frozen_and_unfrozen_in_mid_training() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    model[0].requires_grad_(False)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, offload=simulated())
    laid_out = len(optimizer._core.members.store.tiles)
    plain_model[0].requires_grad_(False)
    for step in range(6):
        for each in (plain_model, model):
            each[0].requires_grad_(step >= 2)
            each[3].requires_grad_(step < 4)
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert len(optimizer._core.members.store.tiles) > laid_out


# -- law 10: the parameter is the user's --------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["before the first step", "later"])
@pytest.mark.parametrize("how", ["load_state_dict", "initialiser", "data", "copy_", "one element"])
def test_what_the_user_wrote_is_the_master(how: str, when: str, dtype: torch.dtype) -> None:
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, offload=simulated())

    def write(each: nn.Sequential) -> None:
        torch.manual_seed(77)
        with torch.no_grad():
            if how == "load_state_dict":
                each.load_state_dict(small_model(dtype, seed=9).state_dict())
            elif how == "initialiser":
                nn.init.normal_(each[0].weight)
            elif how == "data":
                each[0].weight.data = torch.randn(33, 19).to(dtype)
            elif how == "copy_":
                each[0].weight.copy_(torch.randn(33, 19))
            else:
                each[0].weight[3, 4] = 2.5

    for step in range(6):
        if step == (0 if when == "before the first step" else 3):
            for each in (plain_model, model):
                write(each)
            for index in range(len(plain.parameters)):
                plain.refresh(index)
        for each in (plain_model, model):
            loss_of(each, step, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step


def test_an_ema_swap_there_and_back_keeps_the_masters_digits() -> None:
    plain_model, model = twins(torch.bfloat16)
    plain = PlainLoop(plain_model.parameters(), lr=1e-3)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        for each in (plain_model, model):
            loss_of(each, step, torch.bfloat16).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
        model.load_state_dict(kept)
    assert same_weights(plain_model, model)
    masters = [optimizer.state[parameter]["master"] for parameter in model.parameters()]
    assert not all(torch.equal(master, master.bfloat16().float()) for master in masters)


def test_unseen_writes_without_detection_are_adopted_by_refresh_master_and_named_by_debug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    offload = longshore.Offload(detect_writes=False, transfer=longshore.SimulatedTransfer())
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, offload=offload)
    for step in range(4):
        if step == 2:
            for each in (plain_model, model):
                each[2].bias.data.copy_(torch.arange(33.0))  # torch does not count this
            plain.refresh(3)
            with monkeypatch.context() as patch:
                patch.setenv("LONGSHORE_DEBUG", "1")
                loss_of(model, step).backward()
                before = vector(model)
                with pytest.raises(longshore.ParameterError, match=r"2\.bias: 33 of 33.*refresh_master"):
                    optimizer.step()
                assert torch.equal(before, vector(model))
                optimizer.zero_grad()
            optimizer.refresh_master()
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    monkeypatch.setenv("LONGSHORE_DEBUG", "1")
    loss_of(model, 9).backward()
    optimizer.step()  # nothing to complain of


# -- refused by name ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"capturable": True}, "capturable"),
        ({"differentiable": True}, "differentiable"),
        ({"lr": -1.0}, "lr must be a number of at least 0"),
        ({"lr": float("nan")}, "lr must be a number of at least 0"),
        ({"lr": torch.ones(2)}, "lr as a tensor"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]"),
        ({"betas": 0.9}, "betas is a pair"),
        ({"betas": "ab"}, "betas is a pair"),
        ({"betas": {0.5: 1, 0.9: 2}}, "betas is a pair"),
        ({"offload": longshore.Offload(cpu_set=[99999])}, "CPU 99999"),
        ({"offload": longshore.Offload(cpu_set=[2**64])}, "CPU 18446744073709551616 is not among those"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longshore.AdamW(small_model().parameters(), **options)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_set_on_a_group_are_refused_too(option: str) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=option):
        longshore.AdamW([{"params": model.parameters(), option: True}])
    optimizer = longshore.AdamW(model.parameters())
    optimizer.param_groups[0][option] = True
    before = vector(model)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=option):
        optimizer.step()
    assert torch.equal(before, vector(model))


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, False, True])
def test_how_a_step_is_computed_may_be_wished_for(option: str, value: bool | None) -> None:
    """LitGPT and torchtune pass these. The weights are those of fused=True, and torch goes on so from the state."""
    optimizer = longshore.AdamW([{"params": [*small_model().parameters()], option: value}], **{option: value})
    (group,) = optimizer.state_dict()["param_groups"]
    assert (group["fused"], group["foreach"]) == (True, None)


class Sequenced(Sequence):
    """A list of another library, as a configuration's."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.parametrize(
    "pair", [[0.9, 0.95], Sequenced(0.9, 0.95), numpy.array([0.9, 0.95])], ids=["list", "other", "numpy"]
)
def test_numbers_of_other_libraries(pair: Any, tmp_path: Path) -> None:
    """Options of OmegaConf and NumPy: they count, and a checkpoint has them as plain numbers."""
    models = [small_model() for _ in range(2)]
    plain = longshore.AdamW(models[0].parameters(), lr=0.25, betas=(0.9, 0.95), weight_decay=0.5)
    other = longshore.AdamW(models[1].parameters(), lr=numpy.float32(0.25), betas=pair, weight_decay=numpy.float64(0.5))
    for model, optimizer in zip(models, (plain, other), strict=True):
        loss_of(model, 0).backward()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * numpy.cos(0.5)
        optimizer.step()
    assert torch.equal(vector(models[0]), vector(models[1]))
    longshore.save(tmp_path, models[1], other, "a")
    longshore.load(tmp_path, models[1], other)
    (group,) = other.param_groups
    assert [type(group[name]) for name in ("lr", "weight_decay")] == [float, float]
    assert group["betas"] == [0.9, 0.95]


@pytest.mark.parametrize("make", [longshore.AdamW, torch.optim.AdamW])
def test_the_profiler_sees_the_names_that_torch_gives(make: Any) -> None:
    model = small_model()
    optimizer = make(model.parameters())
    loss_of(model, 0).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.name for event in profile.events() if event.name.startswith("Optimizer.")}
    assert names == {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"}


def test_honoured_or_harmless_options() -> None:
    longshore.AdamW(small_model().parameters(), maximize=True)
    with pytest.raises(ValueError, match="tile_numel"):
        longshore.Offload(tile_numel=0)
    for threads in (0, 4097, 2**64):
        with pytest.raises(ValueError, match="threads is a number of host threads, at least 1 and at most 4096"):
            longshore.Offload(threads=threads)
    with pytest.raises(ValueError, match=f"tile_numel is .* at most {2**63 - 1}"):
        longshore.Offload(tile_numel=2**63)
    with pytest.raises(TypeError, match=r"longshore\.Offload"):
        longshore.AdamW(small_model().parameters(), offload={"tile_numel": 4})


@pytest.mark.parametrize("cpus", ["0-1", [], [-1], [True], [0.5]])
def test_what_is_no_set_of_cpus(cpus: Any) -> None:
    with pytest.raises(ValueError, match=r"cpu_set is a sequence of numbers of CPUs, such as \[0, 1\], or None, not"):
        longshore.Offload(cpu_set=cpus)


def test_parameters_are_refused_by_name() -> None:
    shared = torch.randn(8)
    with torch.inference_mode():
        inference = torch.ones(3)
    good = nn.Parameter(torch.ones(4))
    cases = [
        ([("w", nn.Parameter(torch.ones(2, dtype=torch.float64)))], "w is torch.float64"),
        ([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))], "w is torch.complex64"),
        ([("w", nn.Parameter(torch.ones(2, device="meta")))], "meta"),
        ([("v", good), ("w", nn.Parameter(torch.ones(2, device="meta")))], "w is on meta"),
        ([("w", nn.Parameter(torch.ones(1).expand(5)))], "w is expanded"),
        ([("w", nn.Parameter(inference, requires_grad=False))], "inference"),
        ([("a", nn.Parameter(shared)), ("b", nn.Parameter(shared[4:]))], "a and b are different tensors"),
        ([("w", good), ("w", good)], "0 and 1 of a group are the same"),
        ([], "empty parameter list"),
    ]
    for params, message in cases:
        with pytest.raises(ValueError, match=message):
            longshore.AdamW(params)


def test_sparse_and_misfit_gradients_are_refused_by_name_and_nothing_is_lost() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    model = nn.Sequential(embedding, nn.Linear(4, 4))
    optimizer = longshore.AdamW(model.named_parameters())
    before = vector(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(longshore.GradientError, match=r"0\.weight.*sparse"):
        optimizer.step()
    assert torch.equal(before, vector(model))
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()
    assert not torch.equal(before, vector(model))


def test_a_parameter_that_changed_its_dtype_is_named() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.named_parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(torch.bfloat16)
    loss_of(model, 0, torch.bfloat16).backward()
    with pytest.raises(longshore.ParameterError, match=r"0\.weight was torch.float32"):
        optimizer.step()


def test_gradients_that_changed_after_clipping_are_an_error() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(0.1)
    loss_of(model, 1).backward()
    with pytest.raises(longshore.GradientError, match="clip"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [{"norm_type": 1.0}, {"max_norm": 0.0}, {"max_norm": float("nan")}])
def test_clipping_arguments(bad: dict[str, float]) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="norm"):
        optimizer.clip_grad_norm_(**{"max_norm": 1.0, **bad})


def test_error_if_nonfinite() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()
    model[0].weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert optimizer.clip_grad_norm_(1.0).isinf()


# -- failures half way --------------------------------------------------------


@pytest.mark.parametrize("kernel", ["step_tile", "step_table"])
def test_a_step_that_fails_half_way_says_so_until_a_state_is_loaded(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, offload=longshore.Offload(tile_numel=100))
    for each in (plain_model, model):
        loss_of(each, 0).backward()
    plain.step_on_grads()
    optimizer.step()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()  # a regular one, since the state was handed out

    kernels, calls = optimizer._core.members.store.tiles.kernels, []
    whole = getattr(kernels, kernel)
    if kernel == "step_tile":
        optimizer._core._repeated = None  # a regular step

    def interrupted(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        whole(*arguments)

    monkeypatch.setattr(kernels, kernel, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.setattr(kernels, kernel, whole)
    for call in (optimizer.step, optimizer.grad_norm):
        with pytest.raises(longshore.BrokenStateError, match=r"half way.*load"):
            call()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    for each in (plain_model, model):
        loss_of(each, 1).backward()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


def test_an_interrupt_between_the_buffers_and_the_step_counts_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    loss_of(model, 0).backward()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("longshore.optim.parameters.ParameterRecord.mark_published", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(longshore.BrokenStateError, match="half way"):
        optimizer.step()


def test_no_threads_are_left_behind() -> None:
    before = {*threading.enumerate()}  # those of earlier tests may end meanwhile
    for release in (False, True):
        model = small_model()
        optimizer = longshore.AdamW(model.parameters(), release_gradients=release, offload=simulated())
        for step in range(2):
            loss_of(model, step).backward()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    del optimizer
    gc.collect()
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("release", [False, True])
def test_parameters_replaced_before_the_first_step(release: bool) -> None:
    """As Accelerate does when it puts a model on FSDP2: the new ones are stepped."""
    model, twin = small_model(), small_model()
    optimizer = longshore.AdamW([torch.zeros(3, requires_grad=True)], lr=1e-2, release_gradients=release)
    loop = PlainLoop(twin.parameters(), lr=1e-2)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for seed in range(3):
        for each in (model, twin):
            loss_of(each, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step_on_grads()
    assert same_weights(model, twin)
    assert [
        record.parameter is each
        for record, each in zip(optimizer._core.members.records, model.parameters(), strict=True)
    ]


def test_replaced_by_what_cannot_be_stepped() -> None:
    """The optimizer says so, and is as it was."""
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    mine = optimizer.param_groups[0]["params"]
    shared = nn.Parameter(torch.zeros(3))
    optimizer.param_groups[0]["params"] = [shared, nn.Parameter(shared.data)]
    with pytest.raises(ValueError, match="over the same memory"):
        optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = mine
    loss_of(model, 0).backward()
    optimizer.step()


def test_gradients_in_host_memory_are_measured_by_the_host_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the transfer: torch would add their squares in another order than in every other mode."""

    def refuse(device: torch.device) -> None:
        raise AssertionError(f"a sum on {device}")

    monkeypatch.setattr("longshore.optim.tiled_optimizer.block_sums_on", refuse)
    norms = []
    for transfer in (None, longshore.SimulatedTransfer()):
        model = small_model()
        optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(transfer=transfer))
        loss_of(model, 0).backward()
        norms.append(optimizer.grad_norm())
    assert torch.equal(*norms)
