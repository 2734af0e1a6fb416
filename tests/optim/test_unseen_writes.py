"""Writes to parameters that torch cannot see are found by the next step, element by element."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forking_context
from support import KIND_NAMES, KINDS, Kind, PlainLoop, loss_of, same_weights, simulated, twins
from torch import Tensor, nn

import longshore
from longshore.engine.optimizers import from_client


def through_numpy(values: Tensor) -> None:
    memory = values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()
    memory.reshape(-1)[::3] ^= 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "clamp": lambda parameter: parameter.data.clamp_(-0.1, 0.1),
    "copy": lambda parameter: parameter.data.copy_(0.9 * parameter.data),
    "fill": lambda parameter: parameter.data.fill_(0.25),
    "numpy": lambda parameter: through_numpy(parameter.data),
}
PLACES: dict[str, Callable[[], Any]] = {
    "direct": lambda: longshore.Offload(tile_numel=100),
    "none": lambda: longshore.Offload(device="none"),
    "simulated": simulated,
    "split": lambda: longshore.Offload(100, transfer=longshore.SimulatedTransfer(seed=1), ratio=0.3),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def write_everywhere(plain: PlainLoop, models: tuple[nn.Module, nn.Module], write: Callable[[Tensor], object]) -> None:
    """Write to all parameters of both models but one, and note in the plain loop which elements it changed."""
    for model in models:
        for index, parameter in enumerate(model.parameters()):
            if index != 1:
                write(parameter.detach())
    for index in range(len(plain.parameters)):
        plain.refresh(index)


def check(plain: PlainLoop, models: tuple[nn.Module, nn.Module], optimizer: Any, write: Any, steps: int = 5) -> None:
    dtype = next(models[1].parameters()).dtype
    for step in range(steps):
        if step % 2:
            versions = [parameter._version for parameter in models[1].parameters()]
            write_everywhere(plain, models, write)
            assert versions == [parameter._version for parameter in models[1].parameters()], "torch saw it"
        for model in models:
            loss_of(model, step, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(*models), step
    for index, parameter in enumerate(models[1].parameters()):
        if dtype != torch.float32:
            master = plain.masters[index][: parameter.numel()].view(parameter.shape)
            assert torch.equal(optimizer.state[parameter]["master"], master)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_every_write_is_found(kind: Kind, write: str, place: str, dtype: torch.dtype, release: bool) -> None:
    models = twins(dtype)
    plain = kind.loop(models[0].parameters())
    optimizer = kind.make(models[1].parameters(), release_gradients=release, offload=PLACES[place]())
    check(plain, models, optimizer, WRITES[write])
    optimizer.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["RMSprop", "NAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizers_that_torch_steps(place: str, kind: str, dtype: torch.dtype) -> None:
    models = twins(dtype)
    plain = PlainLoop(models[0].parameters(), getattr(torch.optim, kind), lr=1e-2)
    client = getattr(torch.optim, kind)(models[1].parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="run by torch"):
        optimizer = from_client(client, release_gradients=False, offload=PLACES[place]())
    check(plain, models, optimizer, WRITES["clamp"])


@pytest.mark.parametrize("place", ["direct", "simulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_elements_that_were_written_are_taken(place: str, dtype: torch.dtype) -> None:
    """The others keep all digits of their masters."""
    parameter = nn.Parameter(torch.randn(300).to(dtype))
    optimizer = longshore.SGD([parameter], lr=1e-4, offload=PLACES[place]())
    for step in range(2):
        parameter.grad = torch.randn(300).to(dtype)
        optimizer.step()
        before = optimizer.state[parameter].get("master", parameter.detach().clone())
        if step == 0:
            parameter.data[7] = 5.0
            parameter.grad = torch.zeros(300, dtype=dtype)
            optimizer.step()
            after = optimizer.state[parameter].get("master", parameter.detach().clone())
            assert after[7] == 5.0
            kept = torch.arange(300) != 7
            assert torch.equal(after[kept], before[kept])
            assert dtype == torch.float32 or not torch.equal(after, after.to(dtype).float())


@pytest.mark.parametrize("place", ["direct", "simulated"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last"])
def test_parameters_that_are_not_contiguous(place: str, layout: str) -> None:
    made = {
        "transposed": lambda: torch.randn(20, 30).bfloat16().t(),
        "strided": lambda: torch.randn(40, 30).bfloat16()[::2],
        "channels_last": lambda: torch.randn(4, 5, 6, 5).bfloat16().to(memory_format=torch.channels_last),
    }[layout]()
    parameter = nn.Parameter(made)
    twin = nn.Parameter(made.clone())
    assert not parameter.is_contiguous()
    plain, optimizer = PlainLoop([twin], lr=1e-2), longshore.AdamW([parameter], lr=1e-2, offload=PLACES[place]())
    for _ in range(4):
        gradient = torch.randn(parameter.shape).bfloat16()
        parameter.grad, twin.grad = gradient.clone(), gradient.clone()
        plain.step_on_grads()
        optimizer.step()
        assert torch.equal(parameter, twin)
        for each in (parameter, twin):
            each.data.clamp_(-0.3, 0.3)
        plain.refresh(0)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("place", ["direct", "simulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("moment", ["before backward", "after backward", "between backwards"])
def test_stepping_ahead(place: str, dtype: torch.dtype, write: str, moment: str) -> None:
    """A pass during backward reads the old master, whether the write came before or after it."""
    models = twins(dtype)
    transfer = longshore.SimulatedTransfer(seed=2) if place == "simulated" else None
    offload = longshore.Offload(100, transfer=transfer, speculation_memory="100%")
    plain = PlainLoop(models[0].parameters(), lr=1e-2)
    optimizer = longshore.AdamW(models[1].parameters(), lr=1e-2, release_gradients=True, offload=offload)
    backwards = 2 if moment == "between backwards" else 1
    kept = redone = 0
    for step in range(6):
        written = step in (3, 4)
        totals: list[Tensor] = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in plain.parameters]
        for number in range(backwards):
            if written and number == (moment == "between backwards") and moment != "after backward":
                write_everywhere(plain, models, WRITES[write])
            loss_of(models[1], 10 * step + number, dtype).backward()
            loss_of(models[0], 10 * step + number, dtype).backward()
            for total, parameter in zip(totals, plain.parameters, strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
                parameter.grad = None
        if written and moment == "after backward":
            write_everywhere(plain, models, WRITES[write])
        plain.step(totals)
        optimizer.step()
        assert same_weights(*models), step
        record = optimizer.speculation
        assert record is not None
        kept, redone = kept + record.kept, redone + record.redone + record.dropped
    assert kept > 0 and redone > 0
    optimizer.close()


@pytest.mark.parametrize("place", ["direct", "simulated"])
def test_a_write_to_a_parameter_without_a_gradient_is_found_later(place: str) -> None:
    models = twins(torch.bfloat16)
    plain = PlainLoop(models[0].parameters(), lr=1e-2)
    optimizer = longshore.AdamW(models[1].parameters(), lr=1e-2, offload=PLACES[place]())
    for step in range(4):
        if step == 1:
            write_everywhere(plain, models, WRITES["clamp"])
        for model in models:
            loss_of(model, step, torch.bfloat16).backward()
            if step in (1, 2):
                next(iter(model.parameters())).grad = None
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(*models), step


@pytest.mark.parametrize("place", ["direct", "simulated"])
def test_a_write_that_is_undone_leaves_every_digit(place: str) -> None:
    models = twins(torch.bfloat16)
    plain = PlainLoop(models[0].parameters(), lr=1e-2)
    optimizer = longshore.AdamW(models[1].parameters(), lr=1e-2, offload=PLACES[place]())
    for step in range(3):
        for parameter in models[1].parameters():
            kept = parameter.detach().clone()
            parameter.data.fill_(7.0)
            parameter.data.copy_(kept)
        for model in models:
            loss_of(model, step, torch.bfloat16).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(*models), step


@pytest.mark.parametrize("place", ["direct", "simulated"])
def test_the_values_before_the_last_step_are_written_back(place: str) -> None:
    models = twins(torch.bfloat16)
    plain = PlainLoop(models[0].parameters(), lr=1e-2)
    optimizer = longshore.AdamW(models[1].parameters(), lr=1e-2, offload=PLACES[place]())
    for step in range(4):
        before = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        for model in models:
            loss_of(model, step, torch.bfloat16).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(*models), step
        for model, values in zip(models, before, strict=True):
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data.copy_(value)
        for index in range(len(plain.parameters)):
            plain.refresh(index)


def test_the_values_of_the_last_step_written_over_a_refreshed_master() -> None:
    """Their checksum is the published one, but the master is not theirs any more."""
    parameter = nn.Parameter(torch.randn(200).bfloat16())
    optimizer = longshore.SGD([parameter], lr=1e-3, offload=simulated())
    parameter.grad = torch.randn(200).bfloat16()
    optimizer.step()
    published = parameter.detach().clone()
    parameter.data.fill_(3.0)
    optimizer.refresh_master()
    parameter.data.copy_(published)
    parameter.grad = torch.zeros(200).bfloat16()
    optimizer.step()
    assert torch.equal(parameter, published)


@pytest.mark.parametrize("place", ["direct", "simulated"])
def test_a_state_that_is_loaded_over_a_written_parameter(place: str) -> None:
    """A run that is resumed from a state saved after the write goes on as the straight one."""
    models = twins(torch.bfloat16)
    optimizers = [longshore.AdamW(model.parameters(), lr=1e-2, offload=PLACES[place]()) for model in models]
    for step in range(4):
        if step == 2:
            WRITES["clamp"](next(iter(models[0].parameters())).detach())
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, step, torch.bfloat16).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same_weights(*models)


def test_another_process_writes_shared_memory(tmp_path: Path) -> None:
    """As in Hogwild: parameters are in memory that several processes step."""
    memory = tmp_path / "parameter"
    parameter = nn.Parameter(torch.from_file(str(memory), shared=True, size=64, dtype=torch.float32))
    twin = nn.Parameter(torch.zeros(64))
    with torch.no_grad():
        for each in (parameter, twin):
            each.copy_(torch.arange(64.0))
    optimizer = longshore.AdamW([parameter], lr=1e-2)
    plain = torch.optim.AdamW([twin], lr=1e-2, fused=True)
    write = "import array, sys; f = open(sys.argv[1], 'r+b'); f.seek(40); f.write(array.array('f', [0.5] * 20))"
    for step in range(3):
        parameter.grad, twin.grad = torch.ones(64), torch.ones(64)
        optimizer.step()
        plain.step()
        assert torch.equal(parameter, twin), step
        if step == 1:
            subprocess.run([sys.executable, "-c", write, str(memory)], check=True)
            twin.data[10:30] = 0.5


def hogwild(model: nn.Module, name: str, turns: Any, rank: int) -> None:
    """One of two processes, each of which has an optimizer of its own for the shared parameters."""
    torch.set_num_threads(1)
    maker, options = (longshore, {}) if name == "ours" else (torch.optim, {"fused": True})
    optimizer = maker.SGD(model.parameters(), lr=1e-2, **options)
    for step in range(4):
        turns[rank].acquire()
        loss_of(model, 2 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        turns[1 - rank].release()


def test_hogwild_with_share_memory() -> None:
    """The processes take turns, since a race has no bits to compare."""
    context = forking_context()
    models = []
    for name in ("ours", "theirs"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(19, 16), nn.GELU(), nn.Linear(16, 16)).share_memory()
        before = copy.deepcopy(model)
        turns = [context.Semaphore(1), context.Semaphore(0)]
        processes = [context.Process(target=hogwild, args=(model, name, turns, rank), daemon=True) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert not same_weights(model, before)
        models.append(model)
    assert same_weights(*models)


@pytest.mark.parametrize("place", ["direct", "simulated"])
def test_detection_is_switched_off_by_name(place: str) -> None:
    offload = simulated(tile_numel=50) if place == "simulated" else longshore.Offload(50)
    settings = {"tile_numel": 50, "transfer": offload.transfer, "detect_writes": False}
    parameter = nn.Parameter(torch.ones(120, dtype=torch.bfloat16))
    optimizer = longshore.SGD([parameter], lr=1.0, offload=longshore.Offload(**settings))
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert parameter.eq(1).all(), "the write is lost"
        parameter.data.fill_(5.0)
    optimizer.close()
    with pytest.raises(ValueError, match="detect_writes is True or False, not 'no'"):
        longshore.Offload(detect_writes="no")  # pyright: ignore[reportArgumentType]


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models = twins()
    optimizer = longshore.AdamW(models[1].parameters(), lr=1e-2, offload=simulated())
    calls = []
    monkeypatch.setattr("longshore.optim.external_writes.checksums_on", lambda device: lambda values: recorded(values))

    def recorded(values: list[Tensor]) -> Tensor:
        calls.append(len(values))
        return torch.zeros(len(values), dtype=torch.int64)

    for step in range(3):
        loss_of(models[1], step).backward()
        optimizer.step()
        optimizer.zero_grad()
    count = len(list(models[1].parameters()))
    assert calls == [count] * 5, "all parameters at once, before and after each step; the first has none before it"
