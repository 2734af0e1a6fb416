"""Models that begin without their weights, run on every rank."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import longshore
from engine.fully_sharded_cases import Beside, Tower, config_of, make_tower, raised_by


class WithBuffers(Tower):
    """A persistent buffer, and one that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("positions", torch.linspace(0, 1, 4), persistent=False)


def drawn(stage: int, same_state: bool) -> list[Any]:
    """Weights that rank 0 draws are those of every rank, and what they draw next is what it would have been."""
    rank = dist.get_rank()
    torch.manual_seed(0 if same_state else rank)
    with longshore.Init():
        model = Tower()
        has_memory = not any(parameter.is_meta for parameter in model.parameters())
        assert model.head.weight is model.embedding.weight, "what is tied stays tied"
    after = torch.rand(1)
    pair = Beside(model=model, config=config_of(stage=stage))
    pair.check("at the beginning")
    for step in range(2):
        pair.train(step)
    pair.engine.destroy()
    torch.manual_seed(0 if same_state else rank)
    if same_state or rank == 0:
        Tower()  # as if all had been made here
    return [has_memory, torch.equal(after, torch.rand(1))]


def write_files(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """The tower's weights in two files, tied ones once, and a buffer."""
    if dist.get_rank() == 0:
        model = make_tower(dtype)
        tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
        tensors["head.weight"] = tensors.pop("embedding.weight")  # the other name of what is tied
        tensors["seen"] = torch.tensor([5.0, 6.0, 7.0])
        names = sorted(tensors)
        folder.mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in names[::2]}, folder / "a.safetensors")
        save_file({name: tensors[name] for name in names[1::2]}, folder / "b.safetensors")
    dist.barrier()


def read(folder: str, stage: int, dtype: torch.dtype, sharded_before: bool = False) -> None:
    """A model without memory, read from files, trains as the one that was written."""
    write_files(Path(folder))
    with longshore.Init(empty=True):
        model = WithBuffers()
    assert all(parameter.is_meta for parameter in model.parameters())
    if sharded_before:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    pair = Beside(dtype, model=model, config=config_of(dtype, stage=stage), weights=folder)
    try:
        assert model.get_buffer("seen").tolist() == [5.0, 6.0, 7.0]
        assert torch.equal(model.get_buffer("positions"), torch.linspace(0, 1, 4))
        pair.check("at the beginning")
        for step in range(2):
            pair.train(step)
    finally:
        pair.engine.destroy()


def refused(what: str, folder: str, stage: int = 3) -> str:
    """What initialize() says, on this rank."""
    path = Path(folder)
    write_files(path)
    with longshore.Init(empty=True):
        model: Any = WithBuffers()
    weights: Any = folder
    if what == "nothing to read":
        weights = None
    elif what == "missing":
        model.more = nn.Linear(2, 2, bias=False).to("meta")
    elif what == "shape":
        model.blocks[1].up = nn.Linear(3, 4, device="meta")
    elif what == "buffer":
        with torch.device("meta"):
            model = WithBuffers()
            model.register_buffer("mask", torch.zeros(2))
    elif what == "dtype":
        if dist.get_rank() == 0:
            save_file(
                {name: each.to(torch.int8) for name, each in make_tower().named_parameters()}, path / "a.safetensors"
            )
            (path / "b.safetensors").unlink()
        dist.barrier()
    elif what == "no path":
        weights = 5
    elif what == "no folder" or (what == "one rank" and dist.get_rank() == 1):
        weights = str(path / "nowhere")
    elif what == "broken":
        dist.barrier()
        (path / "b.safetensors").write_bytes(b"not at all")
    said = raised_by(lambda: longshore.initialize(model=model, config=config_of(stage=stage), weights=weights))
    return re.sub(r"\S*/", "", said)


class _Watch:
    """The most private memory that this process grew by, sampled."""

    def __enter__(self) -> _Watch:
        self._end = threading.Event()
        self._before = self.most = _private_bytes()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._end.wait(0.0005):
            self.most = max(self.most, _private_bytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.growth = max(self.most, _private_bytes()) - self._before


def _private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def big(folder: str, how: str) -> float:
    """How far this rank's memory grows until the model is sharded, in copies of the weights."""
    from longshore.engine.config import Config
    from longshore.engine.model_sharding import shard_model
    from longshore.engine.ranks import join
    from longshore.engine.weights import first_weights

    # As for tensors of a real model: what is freed goes back at once. glibc keeps smaller ones for later.
    assert ctypes.CDLL(None).mallopt(-3, 1 << 17) == 1  # M_MMAP_THRESHOLD
    ranks, settings = join(), Config(stage=3, optimizer={"type": "AdamW", "lr": 1e-3})
    count, width = 12, 1024
    weights_bytes = count * width * width * 4

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    if how == "files" and ranks.rank == 0:
        save_file({name: each.detach() for name, each in make().named_parameters()}, Path(folder) / "big.safetensors")
    gc.collect()  # what is left of earlier cases, and what malloc kept of it: used again, it would not count as growth
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    with _Watch() as watch:
        with longshore.Init(empty=how == "files", enabled=how != "without"):
            model = make()
        weights = first_weights(model, folder if how == "files" else None, ranks, everywhere=True)
        sharded = shard_model(model, None, settings, ranks, weights)
        weights.close()
    assert sharded is not None
    return watch.growth / weights_bytes


class Odd(nn.Module):
    """What constructors do besides: a parameter that is kept elsewhere too, hooks, weak references (an LSTM's), a
    class of its own, and buffers that are made from parameters, one of them under two names."""

    class Own(nn.Parameter):
        def twice(self) -> torch.Tensor:
            return self * 2

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.linear = nn.Linear(4, 4)
        self.own = self.Own(torch.randn(4))
        self.kept = [self.linear.weight]
        self.linear.bias.register_hook(lambda gradient: gradient * 0.25)
        self.register_buffer("scale", self.own.detach().clone())
        self.register_buffer("scale_again", self.get_buffer("scale"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.get_buffer("scale").mul_(0.5)
        x = nn.functional.linear(self.lstm(x)[0], self.kept[0], self.linear.bias)
        return (x * self.get_buffer("scale_again") + self.own.twice()).pow(2).mean()


def as_without(stage: int) -> None:
    """Under Init a model is, and trains as, what it would be without."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with longshore.Init(enabled=enabled):
            model = Odd()
        kept = model.linear.weight
        engine = longshore.initialize(model=model, config=config_of(stage=stage)).engine
        try:
            assert model.kept[0] is kept is model.linear.weight and type(model.own) is Odd.Own
            assert model.get_buffer("scale") is model.get_buffer("scale_again")
            hook = model.linear.weight.register_hook(lambda gradient: gradient * 0.5)
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                engine.backward(engine(torch.randn(3, 2, 4, generator=generator)))
                engine.step()
            hook.remove()
            found.append([each.detach().clone() for each in model.parameters()])
        finally:
            engine.destroy()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def failed_inside(empty: bool) -> str:
    """Rank 1 fails while it makes its model."""

    def make() -> None:
        with longshore.Init(empty=empty):
            nn.Linear(2, 2)
            if dist.get_rank() == 1:
                raise ArithmeticError("on purpose")

    return raised_by(make)
