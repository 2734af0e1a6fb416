"""``release_gradients=True``: gradients leave during backward, and none is lost without a word."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import PlainLoop, batch, loss_of, same_weights, simulated, small_model, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

import longshore
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import padded_bytes
from longshore.optim.grad_placeholder import ReleasedGradient


def released(model: nn.Module, seed: int = 0, **options: object) -> longshore.AdamW:
    return longshore.AdamW(
        model.named_parameters(), lr=1e-2, release_gradients=True, offload=simulated(seed), **options
    )


def test_a_single_backward_allocates_no_accumulator() -> None:
    model = small_model(torch.bfloat16)
    optimizer = released(model)
    for step in range(3):
        loss_of(model, step, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.host_bytes()["accumulators"] == 0
    loss_of(model, 3, torch.bfloat16).backward()
    loss_of(model, 4, torch.bfloat16).backward()
    optimizer.step()
    padded = sum(tile.layout.buffer_numel for tile in optimizer._core.members.store.tiles)
    largest = max(tile.layout.buffer_numel for tile in optimizer._core.members.store.tiles)
    landing = LANDING_SLOTS * padded_bytes(2 * largest)
    assert optimizer.host_bytes() == {"state": 12 * padded, "gradients": pytest.approx(2 * padded, abs=64 * 50),
                                      "spares": 0, "staging": landing, "accumulators": 4 * padded}  # fmt: skip
    loss_of(model, 5, torch.bfloat16).backward()
    optimizer.step()
    assert optimizer.host_bytes()["accumulators"] == 0


def test_grad_is_a_placeholder_without_memory() -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, ReleasedGradient)
        assert parameter.grad.shape == parameter.shape
        with torch._C.DisableTorchFunctionSubclass():
            assert parameter.grad.untyped_storage().nbytes() <= 4
    assert "0.weight" in repr(model[0].weight.grad)
    with pytest.raises(longshore.LongshoreError, match=r"parameter 0.weight: .* norm asked for it"):
        model[0].weight.grad.data.norm()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("read", "asking"),
    [
        (lambda gradient: gradient.norm(), "norm"),
        (lambda gradient: gradient + 1, "add"),
        (lambda gradient: 2 * gradient, "mul"),
        (lambda gradient: gradient[0], "__getitem__"),
        (lambda gradient: gradient.isnan().any(), "isnan"),
        (lambda gradient: gradient.clone(), "clone"),
        (lambda gradient: gradient.tolist(), "tolist"),
    ],
)
def test_reading_a_gradient_that_is_on_the_host_says_what_to_do(read: Callable[[Any], Any], asking: str) -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    with pytest.raises(longshore.LongshoreError) as caught:
        read(model[0].weight.grad)
    said = str(caught.value)
    held = "its gradient is on the host (as under every engine, and with release_gradients=True)"
    assert said.startswith(f"parameter 0.weight: {held}, and {asking} asked for it. With an engine, set ")
    assert "call optimizer.clip_grad_norm_() and optimizer.grad_norm() (where Accelerate has prepared it: " in said
    assert "), and use release_gradients=False where" in said
    assert "where .grad itself is read or edited, and for a GradScaler" in said
    optimizer.step()  # nothing is lost by asking


def test_gradients_are_freed_during_backward() -> None:
    """The increments that autograd made are gone when backward returns, but for what is in flight."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    alive: list[weakref.ref[torch.Tensor]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: alive.append(weakref.ref(p.grad)))
    offload = simulated(in_flight_bytes=2 * 64 * 64 * 4, tile_numel=1 << 20)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=True, offload=offload)
    model(torch.randn(3, 64)).sum().backward()
    assert offload.transfer.down.peak_bytes <= 2 * 64 * 64 * 4
    optimizer.grad_norm()
    gc.collect()
    assert len(alive) == 8
    assert all(reference() is None for reference in alive)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_backwards_without_announcement(seed: int) -> None:
    """The number of backwards changes from window to window, heads take turns, nobody says so."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = small_model(), nn.Linear(7, 3), nn.Linear(7, 2)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return (self.left if left else self.right)(self.body(x)).pow(2).sum()

    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Heads())
    plain_model, model = models
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = released(model, seed)
    pattern = torch.Generator().manual_seed(seed)
    for step in range(6):
        for part in range(int(torch.randint(1, 4, (), generator=pattern))):
            left = bool(torch.randint(2, (), generator=pattern))
            for each in models:
                each(batch(10 * step + part), left).backward()
        plain.step_on_grads()
        optimizer.step()
        assert same_weights(plain_model, model), step


def test_forward_forward_backward_backward() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for _ in range(3):
        for each in (plain_model, model):
            first, second = loss_of(each, 0), loss_of(each, 1)
            first.backward()
            second.backward()
        plain.step_on_grads()
        optimizer.step()
    assert same_weights(plain_model, model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for step in range(3):
        for each in (plain_model, model):
            x = batch(step).requires_grad_()
            hidden = checkpoint(each[0], x, use_reentrant=reentrant)
            checkpoint(each[1:], hidden, use_reentrant=reentrant).pow(2).sum().backward()
        plain.step_on_grads()
        optimizer.step()
    assert same_weights(plain_model, model)


@pytest.mark.parametrize("discard", ["optimizer", "model", "by hand"])
def test_zero_grad_discards_what_the_host_holds(discard: str) -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for step in range(4):
        loss_of(model, 100 + step).backward()
        loss_of(model, 200 + step).backward()
        if discard == "optimizer":
            optimizer.zero_grad()
        elif discard == "model":
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        assert same_weights(plain_model, model), step


def test_model_zero_grad_right_before_step_leaves_everything_idle() -> None:
    model = small_model()
    optimizer = released(model)
    before = [parameter.clone() for parameter in model.parameters()]
    loss_of(model, 0).backward()
    model.zero_grad()
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == 0


def test_model_zero_grad_of_one_layer_discards_that_layer_only() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        loss_of(each, 0).backward()
        each[0].zero_grad()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("held_before", [False, True])
def test_grad_assigned_by_hand_counts_in_place_of_what_was_held(held_before: bool) -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        if held_before:
            loss_of(each, 9).backward()
        loss = loss_of(each, 0)
        for parameter, gradient in zip(
            each.parameters(), torch.autograd.grad(loss, list(each.parameters())), strict=True
        ):
            parameter.grad = gradient
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)
    optimizer.step()  # it was consumed
    assert same_weights(plain_model, model)


def test_grad_assigned_by_hand_and_then_backward_adds() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        loss_of(each, 8).backward()
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss_of(each, 0).backward()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


def test_autograd_grad_between_backwards_loses_nothing() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        loss_of(each, 0).backward()
        torch.autograd.grad(loss_of(each, 1), list(each.parameters()))
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_create_graph() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        loss_of(each, 0).backward(create_graph=True)
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


def test_an_exception_in_backward_then_zero_grad() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    hidden = model[0](batch(3))
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model[3](model[2](hidden)).sum().backward()
    optimizer.zero_grad()
    for step in range(2):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
    assert same_weights(plain_model, model)


# -- what must not silently do nothing ---------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_clip_grad_norm_fails_loudly(foreach: bool | None) -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    with pytest.raises(longshore.LongshoreError, match=r"optimizer\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    with pytest.raises(longshore.LongshoreError, match=r"optimizer\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
    with pytest.raises(longshore.LongshoreError, match=r"optimizer\.clip_grad_norm_"):
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], foreach=foreach)
    optimizer.step()  # nothing was lost


def test_grad_scaler_fails_loudly() -> None:
    model = small_model()
    optimizer = released(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(longshore.LongshoreError, match="GradScaler"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)


def test_zero_grad_to_zeros_fails_loudly() -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(longshore.LongshoreError, match="set_to_none=True"):
        model.zero_grad(set_to_none=False)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "to": lambda model: model.to("cpu", torch.float32),
    "share_memory": lambda model: model.share_memory(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_to_what_the_model_is_changes_nothing(name: str, swap: bool) -> None:
    """Between two backwards of one window, and between windows."""
    results = []
    for kind, options in ((torch.optim.AdamW, {"fused": True}), (longshore.AdamW, {"release_gradients": True})):
        model = small_model()
        optimizer: Any = kind(model.parameters(), lr=1e-2, **options)
        model.share_memory()
        for step in range(3):
            if step:
                with swapping(swap):
                    CONVERSIONS[name](model)
            loss_of(model, 2 * step).backward()
            with swapping(swap):
                CONVERSIONS[name](model)
            loss_of(model, 2 * step + 1).backward()
            assert options.get("fused") or swap or isinstance(model[0].weight.grad, ReleasedGradient)
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 9).backward()
        assert options.get("fused") or isinstance(model[0].weight.grad, ReleasedGradient), "hooks were set again"
        results.append(model)
    assert same_weights(*results)


@contextlib.contextmanager
def swapping(swap: bool) -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_model_is_half_converted(dtype: torch.dtype, swap: bool) -> None:
    for begun in (False, True):
        model = small_model()
        optimizer = released(model)
        if begun:
            loss_of(model, 0).backward()
            optimizer.step()
        loss_of(model, 1).backward()
        with swapping(swap):
            model.to(dtype)
        assert all(parameter.dtype is dtype is parameter.grad.dtype for parameter in model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            assert model[0].weight.grad.untyped_storage().nbytes() <= 8
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(longshore.GradientError, match=r"parameter 0.weight .*converted to another dtype"):
            optimizer.step()
        model.to(torch.float32).to(dtype)
        with pytest.raises(longshore.GradientError, match="converted to another dtype"):
            optimizer.step()  # torch has rounded such gradients, and the host has not
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        if dtype is torch.float64 or begun:
            model.to(torch.float32)
        optimizer.zero_grad()
        loss_of(model, 2, model[0].weight.dtype).backward()
        optimizer.step()
        assert not torch.equal(before[0].to(model[0].weight.dtype), model[0].weight)


def test_data_of_a_placeholder_is_not_the_users() -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    with pytest.raises(longshore.LongshoreError, match=r"0\.weight: .*__set__ asked for it"):
        model[0].weight.grad.data = torch.ones_like(model[0].weight)
    optimizer.step()


def test_gradients_made_in_inference_mode_and_clipped() -> None:
    """Torch counts no writes to them, so that an edit after clipping would go unseen."""
    for options in ({}, {"release_gradients": True}):
        model = small_model()
        optimizer = longshore.AdamW(model.named_parameters(), **options)
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        with pytest.raises(longshore.GradientError, match=r"0\.weight was made in inference mode"):
            optimizer.clip_grad_norm_(0.1)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        assert optimizer.clip_grad_norm_(0.1) > 1
        optimizer.step()


@pytest.mark.parametrize("discarded", [False, True])
def test_a_backward_after_an_assigned_gradient_was_clipped(discarded: bool) -> None:
    """It is added to what was clipped, and is not; where a script discards what was clipped, nothing is lost."""
    model = small_model()
    optimizer = released(model)
    weight = model[0].weight
    (weight.grad,) = torch.autograd.grad(loss_of(model, 0), [weight])
    optimizer.clip_grad_norm_(1e-3)
    if discarded:
        weight.grad = torch.ones_like(weight)
    loss_of(model, 1).backward()
    if discarded:
        optimizer.step()
        return
    with pytest.raises(longshore.GradientError, match=r"0\.weight changed after optimizer\.clip_grad_norm_\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("release", [False, True])
def test_a_parameter_that_became_expanded_is_found_before_anything_is_stepped(release: bool) -> None:
    parameters = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    optimizer = longshore.AdamW(parameters, release_gradients=release)

    def step() -> None:
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = parameters[0].detach().clone()
    parameters[1].data = torch.ones(1, 3).expand(4, 3)
    with pytest.raises(ValueError, match=r"parameter 0\.1 is expanded"):
        step()
    assert torch.equal(parameters[0], before) and optimizer.state[parameters[0]]["step"] == 1
    parameters[1].data = torch.ones(4, 3)
    step()
    assert not torch.equal(parameters[0], before)


def test_a_backward_after_clipping_is_an_error_by_name() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    before = [parameter.clone() for parameter in model.parameters()]
    loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(0.1)
    loss_of(model, 1).backward()
    with pytest.raises(longshore.GradientError, match=r"[023]\.(weight|bias).*zero_grad"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    for each in (plain_model, model):
        loss_of(each, 2).backward()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


def test_clipping_twice_is_an_error() -> None:
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    norm = optimizer.clip_grad_norm_(0.1)
    assert norm > 0.1
    torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.1), rtol=1e-4, atol=0)
    with pytest.raises(longshore.LongshoreError, match="already"):
        optimizer.clip_grad_norm_(0.1)


def test_hooks_never_raise_and_the_next_step_names_the_parameter() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    model = nn.Sequential(embedding, nn.Linear(4, 4))
    optimizer = released(model)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(longshore.GradientError, match=r"0\.weight.*sparse"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    model[1](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[1], model[1].weight)


def test_ctrl_c_in_a_hook_ends_the_backward_and_the_window_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._core.members.store, "arrive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0).backward()
    with pytest.raises(longshore.GradientError, match=r"KeyboardInterrupt.*zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    for each in (plain_model, model):
        loss_of(each, 1).backward()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


# -- life and death -----------------------------------------------------------


def test_backward_on_another_thread() -> None:
    plain_model, model = twins()
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for each in (plain_model, model):
        # Both there: a new thread has its own number of torch threads, and
        # another order of summation.
        thread = threading.Thread(target=loss_of(each, 0).backward)
        thread.start()
        thread.join()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)


def test_two_threads_in_one_parameter_at_once_are_told() -> None:
    """As in Hogwild by threads: a part of their sum would be lost, without a word."""
    parameter, other = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))
    others_turn, waits = threading.Event(), True

    def wait(_: torch.Tensor) -> None:  # autograd has accumulated, and longshore's hook comes next
        if waits and threading.current_thread() is not second:
            second.start()
            others_turn.wait(10)
            time.sleep(0.2)  # the other thread goes on to longshore's first hook, and waits for autograd's lock

    parameter.register_post_accumulate_grad_hook(wait)
    parameter.register_hook(lambda gradient: others_turn.set() if threading.current_thread() is second else None)
    optimizer = longshore.SGD([("weight", parameter), ("other", other)], lr=1.0, release_gradients=True)

    def backward() -> None:
        with contextlib.suppress(longshore.LongshoreError):  # it may find the placeholder of the first thread
            (parameter * 2).sum().backward()

    second = threading.Thread(target=backward)
    (parameter + other).sum().backward()
    second.join()
    with pytest.raises(longshore.GradientError, match="two threads accumulate the gradient of parameter weight at the"):
        optimizer.step()
    assert not parameter.any() and not other.any()
    optimizer.zero_grad()
    waits = False
    for _ in range(2):  # one after the other they add up, also where one backward of the window failed
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    (parameter * 3).sum().backward()
    optimizer.step()
    assert parameter.eq(-7).all()


def test_hooks_go_with_the_optimizer() -> None:
    model = small_model()
    optimizer = released(model)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    loss_of(model, 0).backward()
    assert not any(isinstance(parameter.grad, ReleasedGradient) for parameter in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_gradients_that_are_lost_with_their_optimizer_are_an_error_for_whoever_uses_them(closed: bool) -> None:
    """In torch they are in ``.grad``, and count in the next step of another optimizer."""
    model = small_model()
    optimizer = released(model)
    loss_of(model, 0).backward()
    if closed:
        optimizer.close()
    del optimizer
    gc.collect()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parameters = list(model.parameters())
    uses: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.optim.SGD(parameters, 0.1).step(), "its gradient is on the host"),
        (lambda: loss_of(model, 1).backward(), "its gradient is on the host"),
        (lambda: longshore.SGD(parameters, 0.1).step(), "its gradient is on the host"),
    ]
    for use, message in uses:
        with pytest.raises(longshore.LongshoreError, match=message):
            use()
    another = released(model)
    with pytest.raises(longshore.GradientError, match="lost with close"):
        another.step()
    another.close()
    assert all(map(torch.equal, before, parameters))
    model.zero_grad()
    loss_of(model, 0).backward()
    longshore.SGD(parameters, 0.1).step()
    assert not torch.equal(before[0], parameters[0])


def test_a_parameter_out_of_its_group_at_zero_grad_has_lost_its_gradient_for_the_next_optimizer() -> None:
    a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = longshore.SGD([a, b], 0.1, release_gradients=True)
    (a + b).sum().backward()
    optimizer.param_groups[0]["params"].pop()
    optimizer.zero_grad()  # torch's leaves the other's .grad
    (a + b).sum().backward()  # into what is lost
    other = longshore.SGD([b], 0.1)
    with pytest.raises(longshore.LongshoreError, match="its gradient is on the host"):
        other.step()
    other.zero_grad()
    (a + b).sum().backward()
    for each in (optimizer, other):
        each.step()
    assert a.eq(0.8).all() and b.eq(0.9).all()  # two gradients of one window, and one


def test_unfrozen_in_mid_training() -> None:
    plain_model, model = twins()
    for each in (plain_model, model):
        each[0].requires_grad_(False)
    plain, optimizer = PlainLoop(plain_model.parameters(), lr=1e-2), released(model)
    for step in range(6):
        for each in (plain_model, model):
            if step == 2:
                each[0].requires_grad_(True)
            if step == 4:
                each[2].requires_grad_(False)
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        assert same_weights(plain_model, model), step
    assert optimizer.state[model[0].weight]["step"] == 4
    assert optimizer.state[model[2].weight]["step"] == 4


def test_a_frozen_parameter_with_a_gradient_set_by_hand() -> None:
    """As in torch it is stepped, and its hooks take gradients again once it thaws."""
    results = []
    for kind, options in ((longshore.SGD, {"release_gradients": True}), (torch.optim.SGD, {})):
        first, second = parameters = [nn.Parameter(torch.ones(16)) for _ in range(2)]
        optimizer = kind(parameters, lr=0.1, **options)
        second.requires_grad_(False)
        second.grad = torch.ones(16)
        optimizer.step()
        optimizer.zero_grad()
        second.requires_grad_(True)
        (first.sum() + second.sum()).backward()
        optimizer.step()
        results.append(parameters)
    assert all(map(torch.equal, *results)) and results[0][1][0] < results[0][0][0]


def test_clipping_takes_a_norm_alone() -> None:
    """As torch's function takes the parameters first."""
    optimizer = longshore.AdamW([nn.Parameter(torch.ones(3))])
    for arguments in (([nn.Parameter(torch.ones(3))], 1.0), ("1.0",), (True,)):
        with pytest.raises(TypeError, match="takes max_norm, a number, and knows its own parameters; it got a"):
            optimizer.clip_grad_norm_(*arguments)
