"""What users and libraries do to optimizers: the right weights, or an error that names the cause."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from support import PlainLoop, batch, loss_of, same_weights, simulated, small_model, twins
from torch import Tensor, nn

import longshore
from longshore.errors import ParameterError

OFF = longshore.Offload(threads=1)
MODES = pytest.mark.parametrize("release", [False, True])


def parameters(count: int = 4, numel: int = 16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel)) for _ in range(count)]


def pair(numel: int = 16, **options: Any) -> tuple[nn.Parameter, nn.Parameter, Any, Any]:
    """The same parameter twice, for torch's fused AdamW and for ours."""
    torch.manual_seed(3)
    theirs = nn.Parameter(torch.randn(numel))
    ours = nn.Parameter(theirs.detach().clone())
    release = options.pop("release", False)
    optimizers = (
        torch.optim.AdamW([theirs], lr=0.5, fused=True, **options),
        longshore.AdamW([ours], lr=0.5, offload=OFF, release_gradients=release, **options),
    )
    return theirs, ours, *optimizers


# -- groups edited by hand ----------------------------------------------------


def test_groups_edited_by_hand_are_followed() -> None:
    results = []
    for kind, options in ((torch.optim.AdamW, {"fused": True}), (longshore.AdamW, {"offload": OFF})):
        a, b, c, d = parameters()
        optimizer = kind([{"params": [a, b], "lr": 1.0}, {"params": [c, d], "lr": 100.0}], **options)
        optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups.reverse()
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        for parameter in (a, b, c, d):
            parameter.grad = torch.ones(16)
        optimizer.step()
        results.append(torch.stack([a, b, c, d]))
    assert torch.equal(*results)
    assert results[0][1].eq(0).all() and results[0][0].ne(0).all()


@MODES
def test_a_tensor_that_is_put_into_a_group_is_stepped_as_in_torch(release: bool) -> None:
    theirs, ours, plain, optimizer = pair(release=release)
    more = [nn.Parameter(torch.ones(16)) for _ in range(2)]
    for step in range(3):
        if step == 1:
            for each, parameter in zip((plain, optimizer), more, strict=True):
                each.param_groups[0]["params"].append(parameter)
        for first, second in zip((theirs, ours), more, strict=True):
            (first.pow(2) + second.pow(3)).sum().backward()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        for parameter in more:
            parameter.grad = None
        assert torch.equal(theirs, ours) and torch.equal(*more)
    assert more[1].ne(1).all() and optimizer.state[more[1]]["step"] == 2
    double = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer.param_groups[0]["params"].append(double)
    (ours * 2).sum().backward()
    if not release:
        with pytest.raises(ValueError, match=r"0\.2 is torch\.float64"):
            optimizer.step()


@MODES
def test_a_failed_add_param_group_leaves_nothing_behind(release: bool) -> None:
    a, b, c = parameters(3)
    bad = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = longshore.AdamW([a], lr=1.0, weight_decay=0, offload=OFF, release_gradients=release)
    with pytest.raises(ValueError, match="float64"):
        optimizer.add_param_group({"params": [b, bad]})
    optimizer.add_param_group({"params": [c]})
    b.grad, bad.grad = torch.ones(16), torch.ones(3, dtype=torch.float64)
    (a + 0 * c).sum().backward()
    optimizer.step()
    assert b.eq(0).all() and c.eq(0).all() and a.ne(0).all()
    assert torch.equal(b.grad, torch.ones(16))


# -- clipping and discarding --------------------------------------------------


@MODES
def test_a_coefficient_goes_with_the_gradients_that_it_was_measured_on(release: bool) -> None:
    for _ in range(20):  # the allocator likes to hand an address out again
        theirs, ours, plain, optimizer = pair(5008, release=release)
        (ours * 100).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        ours.grad = None  # a bad batch
        for parameter in (theirs, ours):
            (parameter * 3).sum().backward()
        plain.step()
        optimizer.step()
        assert torch.equal(theirs, ours)
        # ... and the next window may be clipped, with no word about an earlier one.
        optimizer.zero_grad()
        (ours * 100).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        ours.grad = None
        (ours * 100).sum().backward()
        assert optimizer.clip_grad_norm_(1.0) > 1


@MODES
def test_a_gradient_assigned_after_clipping_is_not_clipped(release: bool) -> None:
    theirs, ours, plain, optimizer = pair(release=release)
    (ours * 100).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    theirs.grad, ours.grad = torch.full((16,), 5.0), torch.full((16,), 5.0)
    plain.step()
    optimizer.step()
    assert torch.equal(theirs, ours)


@MODES
def test_clipped_and_strange_gradients_in_one_step_are_an_error(release: bool) -> None:
    a, b = parameters(2)
    optimizer = longshore.AdamW([("a", a), ("b", b)], offload=OFF, release_gradients=release)
    (a * 100).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    (b * 100).sum().backward()
    with pytest.raises(longshore.GradientError, match=r"parameter b changed.*zero_grad"):
        optimizer.step()


@MODES
def test_layers_discarded_after_clipping_are_idle_and_the_others_clipped(release: bool) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release, offload=simulated())
    for each in (plain_model, model):
        loss_of(each, 0).backward()
    norm = optimizer.clip_grad_norm_(0.5)
    for each in (plain_model, model):
        each[0].zero_grad()
    plain.step_on_grads(torch.clamp(0.5 / (norm + 1e-6), max=1.0).item())
    optimizer.step()
    assert same_weights(plain_model, model)


# -- placeholders moved about -------------------------------------------------


def test_a_saved_placeholder_does_not_vouch_for_another_gradient() -> None:
    (a,) = parameters(1)
    optimizer = longshore.AdamW([a], release_gradients=True, offload=OFF)
    (a * 2).sum().backward()
    saved = a.grad
    a.grad = None
    (a * -3).sum().backward()
    a.grad = saved
    with pytest.raises(longshore.GradientError, match="placeholder"):
        optimizer.step()
    optimizer.zero_grad()
    (a * 2).sum().backward()
    saved = a.grad
    optimizer.step()
    a.grad = saved
    with pytest.raises(longshore.GradientError, match="placeholder"):
        optimizer.step()


def test_swapped_or_shared_placeholders_are_an_error() -> None:
    a, b = parameters(2)
    optimizer = longshore.AdamW([a, b], release_gradients=True, offload=OFF)
    (a * 2 - b * 3).sum().backward()
    a.grad, b.grad = b.grad, a.grad
    with pytest.raises(longshore.GradientError, match="placeholder"):
        optimizer.step()
    optimizer.zero_grad()

    (a * 2).sum().backward()
    second = longshore.AdamW([a], release_gradients=True, offload=OFF)
    with pytest.raises(longshore.GradientError, match="placeholder"):
        second.step()
    (a * 2).sum().backward()
    with pytest.raises(longshore.GradientError, match=r"another optimizer.*0\.0|placeholder"):
        second.step()


def test_a_backward_that_brings_nothing_to_a_parameter() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum() * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None

    theirs, ours, plain, optimizer = pair(release=True)
    for parameter in (theirs, ours):
        (parameter * 2).sum().backward()
        Nothing.apply(parameter).backward()
    plain.step()
    optimizer.step()
    assert torch.equal(theirs, ours)


def test_a_model_converted_there_and_back_between_backwards() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=simulated())
    for each in (plain_model, model):
        each.double()
        each.float()  # autograd makes new accumulation nodes
    for index in range(6):
        plain.refresh(index)
    for step in range(3):
        for part in range(2):
            for each in (plain_model, model):
                loss_of(each, 10 * step + part).backward()
        plain.step_on_grads()
        optimizer.step()
        assert same_weights(plain_model, model)


# -- memory that is not what it seems -----------------------------------------


@pytest.mark.parametrize("numel", [1000, 4096, 20000])
def test_new_data_at_an_old_address_is_the_master(numel: int) -> None:
    for _ in range(10):
        parameter = nn.Parameter(torch.rand(numel))
        optimizer = longshore.AdamW([parameter], lr=0.0, weight_decay=0, offload=OFF)
        parameter.grad = torch.ones(numel)
        optimizer.step()
        parameter.data = parameter.data * 0.9
        parameter.data = parameter.data + 0.5
        wanted = parameter.detach().clone()
        optimizer.step()
        assert torch.equal(wanted, parameter)


def test_transposed_in_place_is_the_master() -> None:
    parameter = nn.Parameter(torch.rand(8, 8))
    optimizer = longshore.AdamW([parameter], lr=0.0, weight_decay=0, offload=OFF)
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    parameter.data = parameter.data.t()
    wanted = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(wanted, parameter)


def test_a_parameter_that_is_put_into_two_groups_is_refused() -> None:
    a, b, c, d = (nn.Parameter(torch.ones(4)) for _ in range(4))
    optimizer = longshore.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 10.0}], lr=1.0, offload=OFF)
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [c, d], [c]
    c.grad = d.grad = torch.ones(4)
    places = r"param_groups\[0\]\['params'\]\[0\] or param_groups\[1\]\['params'\]\[0\]"
    with pytest.raises(ParameterError, match=rf"parameter 1\.0 is in the parameter groups twice; .*: {places}$"):
        optimizer.step()
    assert torch.equal(c, torch.ones(4))


def test_the_same_memory_in_two_parameters_is_refused_and_columns_of_one_matrix_are_not() -> None:
    encoder = nn.Parameter(torch.randn(4, 6))
    decoder = nn.Parameter(encoder.data.t())
    with pytest.raises(ValueError, match="same memory"):
        longshore.AdamW([encoder, decoder])
    matrix, vector = torch.randn(6, 8), torch.randn(20)
    split = [matrix[:, :5], matrix[:, 5:], vector[::2], vector[1::2]]
    longshore.AdamW([nn.Parameter(view) for view in split], offload=OFF)
    with pytest.raises(ValueError, match=r"0\.0 and 0\.1"):
        longshore.AdamW([nn.Parameter(matrix), nn.Parameter(matrix[:, 2:4])])

    a, b = parameters(2)
    optimizer = longshore.AdamW([("a", a), ("b", b)], offload=OFF)
    (a + b).sum().backward()
    optimizer.step()
    a.data = b.data
    with pytest.raises(ValueError, match="a and b are different tensors"):
        optimizer.step()


@MODES
@pytest.mark.parametrize("tile_numel", [4, 1 << 20])
def test_strided_vectors(tile_numel: int, release: bool) -> None:
    def make() -> list[nn.Parameter]:
        torch.manual_seed(1)
        matrix = torch.randn(12, 3)
        return [nn.Parameter(torch.randn(20)[::2]), nn.Parameter(matrix[:, 0]), nn.Parameter(matrix[:, 1:2])]

    theirs, ours = make(), make()
    plain = PlainLoop(theirs, lr=0.1)
    optimizer = longshore.AdamW(
        ours, lr=0.1, release_gradients=release, offload=longshore.Offload(tile_numel=tile_numel)
    )
    for step in range(3):
        for each in (theirs, ours):
            torch.cat([parameter.flatten().pow(2) for parameter in each]).sum().backward()
            if step == 1:
                each[0].grad = torch.arange(20.0)[::2]
                each[1].grad = torch.ones(1).expand(12)
                each[2].grad = torch._neg_view(torch.ones(12, 1))
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True)), step


# -- states from outside ------------------------------------------------------


def test_loading_after_a_failed_first_step_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, plain, optimizer = pair()
    fresh, weights = copy.deepcopy(optimizer.state_dict()), ours.detach().clone()
    ours.grad = torch.full((16,), 100.0)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._core.members.store.tiles.streams, "end_publish", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    with torch.no_grad():
        ours.copy_(weights)
    optimizer.load_state_dict(fresh)
    theirs.grad, ours.grad = torch.ones(16), torch.ones(16)
    plain.step()
    optimizer.step()
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("state"), "needs 'state'"),
        (lambda s: s.pop("param_groups"), "param_groups"),
        (lambda s: s["state"][0].pop("exp_avg_sq"), "lacks exp_avg_sq"),
        (lambda s: s["state"][0].pop("step"), "lacks step"),
        (lambda s: s["state"][0].update(step=float("inf")), "not a count"),
        (lambda s: s["state"][0].update(step=1e300), "not a count"),
        (lambda s: s["state"][0].update(step="3"), "not a count"),
        (lambda s: s["state"][0].update(step=-1), "not a count"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(16).to_sparse()), "sparse"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(16, device="meta")), "meta"),
        (lambda s: s["state"][0].update(exp_avg=[0.0] * 16), "list"),
    ],
)
def test_states_that_are_none_change_nothing(edit: Any, message: str) -> None:
    a, b = parameters(2)
    optimizer = longshore.AdamW([a, b], offload=OFF)
    (a + b).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    edit(bad)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    for index in (0, 1):
        assert all(torch.equal(before["state"][index][key], after["state"][index][key]) for key in before["state"][0])


# -- leaks, forks, devices, many parameters -----------------------------------


@MODES
def test_parameters_go_with_a_dropped_optimizer(release: bool) -> None:
    (a,) = parameters(1)
    optimizer = longshore.AdamW([a], release_gradients=release, offload=OFF)
    (a * 2).sum().backward()
    gone = weakref.ref(a)
    del optimizer
    gc.collect()
    del a
    gc.collect()
    assert gone() is None


def test_a_forked_child_gets_an_error_and_no_hang() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), release_gradients=True, offload=OFF)
    for step in range(2):
        loss_of(model, step).backward()
    optimizer.step()  # the worker has its thread now
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            loss_of(model, 0).backward()
            loss_of(model, 1).backward()
            optimizer.step()
        except longshore.LongshoreError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@MODES
def test_whatever_the_default_device(release: bool) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    with torch.device("meta"):
        optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release, offload=simulated())
    loss_of(plain_model, 0).backward()
    x = batch(0)
    loss = model(x).float().pow(2).sum()
    with torch.device("meta"):
        loss.backward()
        assert optimizer.clip_grad_norm_(1e9).device.type == "cpu"
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"].device.type == "cpu"
    plain.step_on_grads()
    assert same_weights(plain_model, model)


@pytest.mark.medium
@MODES
def test_an_optimizer_for_each_parameter_starts_no_threads(release: bool) -> None:
    gc.collect()  # optimizers of other tests may still have threads
    many = parameters(500, 8)
    first = longshore.AdamW(many[:1], release_gradients=release, offload=longshore.Offload(threads=3))
    gc.collect()
    native, python = len(os.listdir("/proc/self/task")), threading.active_count()
    rest = [
        longshore.AdamW([each], release_gradients=release, offload=longshore.Offload(threads=3)) for each in many[1:]
    ]
    torch.cat(many).sum().backward()
    for optimizer in (first, *rest):
        optimizer.step()
    # Threads of earlier tests may end meanwhile.
    assert len(os.listdir("/proc/self/task")) <= native
    assert threading.active_count() <= python
    # What is added to gradients on the host is added on threads that the optimizers share.
    for _ in range(2):
        torch.cat(many).sum().backward()
    for optimizer in (first, *rest):
        optimizer.step()
    assert threading.active_count() <= python + (os.cpu_count() or 1) * release
    for optimizer in (first, *rest):
        optimizer.close()
    assert threading.active_count() <= python


@pytest.mark.medium
@MODES
def test_ten_thousand_small_parameters_cost_no_more_than_their_number(release: bool) -> None:
    """Counted, not timed: how often tiles are walked must not grow with parameters times parameters."""
    many = parameters(2000, 1)
    optimizer = longshore.AdamW(many, release_gradients=release, offload=OFF)
    walks = []
    for tile in optimizer._core.members.store.tiles:
        whole = tile.end_window
        tile.end_window = lambda stepped, whole=whole: walks.append(1) or whole(stepped)  # type: ignore[method-assign]
    for _ in range(2):
        torch.cat(many).sum().backward()
        for parameter in many:
            parameter.grad = None
        torch.cat(many).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state_dict()["state"]) == 2000
    assert len(walks) <= 10


@pytest.mark.parametrize("again", [False, True])
def test_calls_in_a_step_grow_as_parameters_do(again: bool) -> None:
    """In a first step, which adopts masters, as in one in which nothing is new."""

    def calls_of(count: int) -> int:
        many = parameters(count)
        optimizer, calls = longshore.AdamW(many, offload=OFF), [0]
        for parameter in many:
            parameter.grad = torch.ones(16)
        if again:
            optimizer.step()
        sys.setprofile(lambda frame, event, argument: calls.__setitem__(0, calls[0] + event.endswith("call")))
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return calls[0]

    calls_of(1)  # imports
    few, more = calls_of(100), calls_of(400)
    assert 100 < few < more < 4.5 * few
    assert not again or more < 25 * 400


AFTER_MAIN = """
import atexit, threading
import torch, longshore

offload = longshore.Offload(8, transfer=longshore.SimulatedTransfer(seed=0), speculation_memory="100%")
model, plain = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
plain.load_state_dict(model.state_dict())
released = longshore.AdamW(model.parameters(), release_gradients=True, offload=offload)
torchs = torch.optim.AdamW(plain.parameters(), fused=True)

def steps():
    for _ in range(3):
        for module, optimizer in ((model, released), (plain, torchs)):
            for _ in range(2):
                module(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

def late():
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()
    steps()
    print("equal" if all(map(torch.equal, model.parameters(), plain.parameters())) else "different")

steps()
threading.Thread(target=late).start()
atexit.register(late)  # after the thread
"""


@pytest.mark.medium
def test_training_goes_on_after_the_main_thread_has_ended() -> None:
    run = subprocess.run([sys.executable, "-c", AFTER_MAIN], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.split()) == (0, ["equal", "equal"]), run.stderr
