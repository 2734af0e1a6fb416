"""Programs whose records are compared: modes, formats, stages, Muon, failures, discarded windows.

Each is short, trains on numbers that every machine computes alike, and ends its windows with ``mark``. Copies are those
of the simulated transfer, without delays.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longshore
from longshore.errors import LongshoreError
from replay.recorder import Recorder, Window

Mark = Callable[[Iterator[tuple[str, Tensor]]], None]
RUNS: dict[str, Run] = {}


@dataclass(frozen=True)
class Run:
    program: Callable[[Mark], None]
    ranks: int = 1
    ahead: bool = False
    """Whether tiles may be stepped ahead: how many are depends on time, and so do the calls, but no other record."""


def run(name: str, ranks: int = 1, ahead: bool = False, **arguments: Any) -> Callable[[Any], Any]:
    def add(program: Callable[..., None]) -> Callable[..., None]:
        RUNS[name] = Run(lambda mark: program(mark, **arguments), ranks, ahead)
        return program

    return add


def numbers(seed: int, *shape: int) -> Tensor:
    """Multiples of 1/64 between -2 and 2."""
    return torch.randint(-128, 129, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


class Net(nn.Module):
    """Matrices, vectors, one of a single element, a head that is used in turn, and a weight that two layers have."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 64), nn.Linear(64, 6)
        self.heads = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
        self.large = nn.Linear(64, 128)
        self.gain = nn.Parameter(torch.ones(1))
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(numbers(seed, *parameter.shape) / 8)
        self.to(dtype)

    def forward(self, batch: Tensor, head: int = 0) -> Tensor:
        hidden = torch.relu(self.into(batch))
        hidden = torch.relu(self.heads[head](hidden) + hidden)
        hidden = torch.relu(self.large(hidden))[:, :64] * self.gain
        return (self.out(hidden).float() ** 2).mean()


def batch(seed: int, model: nn.Module) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return numbers(1000 + 10 * seed + rank, 4, 24).to(next(model.parameters()).dtype)


def of(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for index, states in optimizer.state_dict()["state"].items():
        yield from ((f"{index} {name}", value) for name, value in states.items() if isinstance(value, Tensor))


def trained(model: nn.Module, kind: Any) -> Any:
    return longshore.muon_groups(model) if kind is longshore.Muon else model.parameters()


def simulated(**settings: Any) -> longshore.Offload:
    transfer = longshore.SimulatedTransfer(seed=0, max_delay_s=0.0)
    return longshore.Offload(transfer=transfer, tile_numel=1000, threads=1, **settings)


def direct(**settings: Any) -> longshore.Offload:
    return longshore.Offload(tile_numel=1000, threads=1, **settings)


# -- one optimizer -------------------------------------------------------------


@run("AdamW, float32", kind=longshore.AdamW, weight_decay=0.1)
@run("AdamW, bf16, clipped", kind=longshore.AdamW, dtype=torch.bfloat16, max_norm=0.5)
@run("AdamW, simulated copies", kind=longshore.AdamW, dtype=torch.bfloat16, offload=simulated)
@run("AdamW, fp16, simulated copies", kind=longshore.AdamW, dtype=torch.float16, offload=simulated)
@run("AdamW, states where the parameters are", kind=longshore.AdamW, offload=lambda: direct(device="none"))
@run("AdamW, two backends", kind=longshore.AdamW, dtype=torch.bfloat16, offload=lambda: simulated(ratio=0.5))
@run("AdamW, bf16 states", kind=longshore.AdamW, offload=lambda: direct(states="bf16", states_seed=3))
@run("AdamW, 8-bit states", kind=longshore.AdamW, dtype=torch.bfloat16, offload=lambda: simulated(states="8bit"))
@run("Adam, maximize", kind=longshore.Adam, weight_decay=0.01, maximize=True)
@run("SGD, nesterov", kind=longshore.SGD, lr=0.01, momentum=0.9, nesterov=True)
@run("SGD without momentum", kind=longshore.SGD, lr=0.01, dtype=torch.bfloat16, offload=simulated)
@run("Lion", kind=longshore.Lion, lr=0.001, dtype=torch.bfloat16)
@run("Adagrad", kind=longshore.Adagrad, lr=0.01, initial_accumulator_value=0.5, offload=simulated)
@run("Muon", kind=longshore.Muon, lr=0.01, dtype=torch.bfloat16, offload=simulated)
@run("released, float32", released=True, kind=longshore.AdamW)
@run("released, bf16", released=True, kind=longshore.AdamW, dtype=torch.bfloat16, offload=simulated)
@run(
    "released, bf16 states",
    released=True,
    kind=longshore.AdamW,
    dtype=torch.bfloat16,
    offload=lambda: simulated(states="bf16"),
)
@run("released, Muon", released=True, kind=longshore.Muon, dtype=torch.bfloat16, offload=simulated, lr=0.01)
@run("released, ahead", ahead=True, released=True, kind=longshore.AdamW, dtype=torch.bfloat16,
     offload=lambda: simulated(speculation_memory="100%"))  # fmt: skip
@run("released, ahead, Lion, clipped", ahead=True, released=True, kind=longshore.Lion, dtype=torch.bfloat16,
     max_norm=0.5, offload=lambda: simulated(speculation_memory="100%"))  # fmt: skip
def one_optimizer(
    mark: Mark,
    kind: Any,
    dtype: torch.dtype = torch.float32,
    offload: Callable[[], longshore.Offload] = direct,
    max_norm: float | None = None,
    released: bool = False,
    **options: Any,
) -> None:
    model = Net(dtype)
    optimizer = kind(trained(model, kind), offload=offload(), release_gradients=released, **options)
    for step in range(4):
        for micro in range(1 + step % 2):
            model(batch(2 * step + micro, model), head=step % 2).backward()
        if max_norm is not None and released:
            optimizer.clip_grad_norm_(max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        mark(of(model, optimizer))
    optimizer.close()


@run("repeated steps", kind=longshore.AdamW)
@run("repeated steps, SGD in bf16", kind=longshore.SGD, dtype=torch.bfloat16, lr=0.01, momentum=0.9)
@run("repeated steps, 8-bit states", kind=longshore.AdamW, offload=lambda: direct(states="8bit"))
def repeated(
    mark: Mark,
    kind: Any,
    dtype: torch.dtype = torch.float32,
    offload: Callable[[], longshore.Offload] = direct,
    **options: Any,
) -> None:
    """Nothing is new from step to step: gradients stay where they are, and nobody looks at the state."""
    model = Net(dtype)
    optimizer = kind(model.parameters(), offload=offload(), **options)
    for step in range(5):
        model(batch(step, model)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    mark(of(model, optimizer))
    optimizer.close()


@run("discarded", offload=simulated)
@run("discarded, ahead", ahead=True, offload=lambda: simulated(speculation_memory="100%"))
def discarded(mark: Mark, offload: Callable[[], longshore.Offload]) -> None:
    """Windows that are given up: gradients set to none, a hook that raises, one that is interrupted."""
    model = Net(torch.bfloat16)
    optimizer = longshore.AdamW(model.parameters(), offload=offload(), release_gradients=True)
    raising = [False]

    def hook(gradient: Tensor) -> None:
        if raising[0]:
            raise RuntimeError("on purpose")

    model.into.weight.register_hook(hook)
    for step in range(5):
        model(batch(step, model)).backward()
        if step == 1:
            optimizer.zero_grad()
            model(batch(10, model), head=1).backward()
        if step == 3:
            raising[0] = True
            with suppress(RuntimeError):
                model(batch(11, model)).backward()
            raising[0] = False
            optimizer.zero_grad()
            model(batch(12, model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mark(of(model, optimizer))
    optimizer.close()


@run("written, frozen, grouped")
def edited(mark: Mark) -> None:
    """Writes to parameters and states, seen and unseen; a group that comes later; a parameter that is frozen."""
    model = Net(torch.bfloat16)
    later = [*model.large.parameters()]
    first = [p for p in model.parameters() if all(p is not each for each in later)]
    optimizer = longshore.AdamW(first, lr=0.01, offload=simulated())
    for step in range(5):
        if step == 1:
            with torch.no_grad():
                model.into.bias.mul_(0.5)
            model.out.weight.data.view(torch.int16).numpy()[0, :3] = 0
        if step == 2:
            optimizer.add_param_group({"params": later, "lr": 0.003})
            optimizer.state[model.into.weight]["exp_avg"].mul_(0.5)
        if step == 3:
            model.heads[0].weight.requires_grad_(False)
            optimizer.param_groups[0]["weight_decay"] = 0.2
        model(batch(step, model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mark(of(model, optimizer))
    optimizer.close()


@run("resumed", states="fp32")
@run("resumed, 8-bit states", states="8bit")
def resumed(mark: Mark, states: str) -> None:
    """Through ``state_dict``, and through a checkpoint of ours."""
    model = Net(torch.bfloat16)
    optimizer = longshore.AdamW(model.parameters(), offload=simulated(states=states))
    with tempfile.TemporaryDirectory() as folder:
        for step in range(4):
            model(batch(step, model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            mark(of(model, optimizer))
            if step == 0:
                longshore.save(folder, model, optimizer)
            if step == 1:
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                optimizer.close()
                saved.seek(0)
                optimizer = longshore.AdamW(model.parameters(), offload=simulated(states=states))
                optimizer.load_state_dict(torch.load(saved))
            if step == 2:
                longshore.load(folder, model, optimizer)
                mark(of(model, optimizer))
    optimizer.close()


@run("a client's RMSprop", kind=torch.optim.RMSprop, momentum=0.9)
@run("a client's NAdam", kind=torch.optim.NAdam)
def of_a_client(mark: Mark, kind: Any, **options: Any) -> None:
    """Torch's roots and powers have other bits on other processors: where ours differs from torch's is recorded."""
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = longshore.from_client(kind(model.parameters(), **options), offload=simulated())
    theirs = kind(twin.parameters(), foreach=False, **options)
    for step in range(3):
        for net, stepped in ((model, optimizer), (twin, theirs)):
            net(batch(step, net)).backward()
            stepped.step()
            stepped.zero_grad()
        expected = dict(of(twin, theirs))
        mark((name, (value != expected[name]).float()) for name, value in of(model, optimizer) if name in expected)
    optimizer.close()


# -- engines -------------------------------------------------------------------


def initialized(
    model: nn.Module, stage: int, optimizer: str = "AdamW", offload: dict[str, Any] | None = None, **config: Any
) -> Any:
    options = {"ns_method": "standard"} if optimizer == "Muon" else {}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01, **options}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 3000,
            "offload_optimizer": {"device": "cpu"},
        },
        **config,
    }
    engine, *_ = longshore.initialize(model=model, config=settings, offload=simulated(**(offload or {})), device="cpu")
    return engine


BF16: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": False}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


@run("engine, stage 0, bf16", stage=0, **BF16)
@run("engine, stage 0, fp16", stage=0, overflow=True, **FP16)
@run("engine, ahead", ahead=True, stage=0, offload={"speculation_memory": "100%"}, **BF16)
@run("engine, stage 1", 2, stage=1, **BF16)
@run("engine, stage 2", 2, stage=2, **BF16)
@run("engine, stage 2, float32", 2, stage=2)
@run("engine, stage 2, fp16", 2, stage=2, overflow=True, **FP16)
@run("engine, stage 2, bf16 states", 2, stage=2, offload={"states": "bf16"}, **BF16)
@run("engine, stage 2, Muon", 2, stage=2, optimizer="Muon", **BF16)
@run("engine, stage 2, ahead", 2, ahead=True, stage=2, offload={"speculation_memory": "100%"}, **BF16)
@run("engine, stage 3", 2, stage=3, **BF16)
@run("engine, stage 3, fp16", 2, stage=3, overflow=True, **FP16)
@run("engine, stage 3, Muon", 2, stage=3, optimizer="Muon", **BF16)
def by_engine(mark: Mark, overflow: bool = False, **arguments: Any) -> None:
    model = Net()
    engine = initialized(model, **arguments)
    micro = 0
    for step in range(4):
        for _ in range(2):
            micro += 1
            loss = engine(batch(micro, model), head=step % 2)
            if overflow and step == 2:
                loss = loss * torch.inf
            engine.backward(loss)
            engine.step()
        mark(of(model, engine.optimizer))
    engine.destroy()


@run("engine, stage 2, one rank fails", 2, stage=2)
@run("engine, stage 3, one rank fails", 2, stage=3)
def one_fails(mark: Mark, stage: int) -> None:
    """A hook raises on one rank, every rank gives the window up, and all go on."""
    model = Net()
    engine = initialized(model, stage, **BF16)
    raising = [False]

    def hook(gradient: Tensor) -> None:
        if raising[0] and dist.get_rank() == 1:
            raise RuntimeError("on purpose")

    for step in range(4):
        for micro in range(2):
            hidden = batch(2 * step + micro, model).requires_grad_()
            raising[0] = step == 2 and micro == 1
            loss = engine(hidden)
            loss.register_hook(hook)
            try:
                engine.backward(loss)
                engine.step()
            except (RuntimeError, LongshoreError):
                engine.zero_grad()
        mark(of(model, engine.optimizer))
    engine.destroy()


@run("stage 2 through sockets", 2)
def without_shared_memory(mark: Mark) -> None:
    from ranks.gathering_cases import sharing

    with sharing("sockets"):
        by_engine(mark, stage=2, **BF16)


def played(name: str) -> list[Any]:
    """The windows of a run, on this rank."""
    torch.set_num_threads(1)
    run, recorder = RUNS[name], Recorder()
    windows: list[Window] = []
    with recorder.recording():
        run.program(lambda tensors: windows.append(recorder.mark(tensors)))
    return [each._replace(calls={}, bytes="")._asdict() if run.ahead else each._asdict() for each in windows]
