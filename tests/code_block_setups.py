"""What the code blocks of the pages find: models, data and files, by the name in ``setup:``; and what is checked after.

Each is a context: what it yields are the names of the block; what it does afterwards fails the test where the block did
not do what its page says. ``longshore``, ``torch`` and ``nn`` are always there.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from code_blocks import ROOT
from plain_muon import PlainMuon
from support import PlainLoop
from torch import Tensor, nn

import longshore
from longshore.optim.tiled_optimizer import TiledOptimizer

Names = dict[str, Any]
_SETUPS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Names]]] = {}


def setup(function: Callable[[Path], Iterator[Names]]) -> Callable[[Path], contextlib.AbstractContextManager[Names]]:
    """Make a generator known by its name; it is given the folder in which the block runs."""
    _SETUPS[function.__name__] = contextlib.contextmanager(function)
    return _SETUPS[function.__name__]


@contextlib.contextmanager
def prepared(name: str | None, folder: Path) -> Iterator[Names]:
    """The names of a block; engines and optimizers that it made are closed at the end."""
    if name and name not in _SETUPS:
        for module in ("code_block_sharded", "code_block_trainers"):
            importlib.import_module(module)
    names: Names = {"longshore": longshore, "torch": torch, "nn": nn, "__name__": "__main__"}
    with _SETUPS[name](folder) if name else contextlib.nullcontext({}) as more:
        names |= more
        try:
            yield names
            more |= names
        except BaseException:
            _close(names)
            raise
    _close(names)


def _close(names: Names) -> None:
    for value in list(names.values()):
        if isinstance(value, longshore.Engine):
            value.destroy()
        elif isinstance(value, TiledOptimizer):
            value.close()


class Net(nn.Module):
    """A model with ``.loss`` in what it returns, as those of transformers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, batch: Tensor) -> Any:
        return SimpleNamespace(loss=self.layers(batch).float().square().sum())


def batches_of(width: int = 8, rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(4, width, generator=generator) for _ in range(3)]


def _trained_like_plain(model: nn.Module, before: nn.Module, batches: list[Tensor], clip: str) -> None:
    """Plain PyTorch, from the same weights with the same gradients and norm, ends with the same bits."""
    loop = PlainLoop(before.parameters(), lr=1e-4)
    clipped = 0
    for batch in batches:
        before(batch).loss.backward()
        coefficient = torch.ones(())
        if clip == "torch":
            assert nn.utils.clip_grad_norm_(before.parameters(), 1.0) > 1.0
        elif clip == "ours":
            squares = sum(p.grad.double().square().sum() for p in before.parameters())
            coefficient = torch.clamp(1.0 / (torch.as_tensor(squares).sqrt().float() + 1e-6), max=1.0)
            assert coefficient < 1.0  # clipping really acts
        clipped += clip != "none"
        loop.step_on_grads(float(coefficient))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def _loop(clip: str) -> Iterator[Names]:
    torch.manual_seed(0)
    model, batches = Net(), batches_of()
    before = copy.deepcopy(model)
    yield {"model": model, "loader": batches}
    _trained_like_plain(model, before, batches, clip)


@setup
def loop(_: Path) -> Iterator[Names]:
    """A loop that clips by the optimizer's own norm."""
    yield from _loop("ours")


@setup
def torch_loop(_: Path) -> Iterator[Names]:
    """A loop that clips by torch's norm."""
    yield from _loop("torch")


def _one_optimizer() -> Iterator[Names]:
    torch.manual_seed(0)
    model, batches = Net(), batches_of()
    before, names = copy.deepcopy(model), {"model": model}
    yield names
    for batch in batches:
        model(batch).loss.backward()
        names["optimizer"].step()
    _trained_like_plain(model, before, batches, "none")
    names["speculation"] = names["optimizer"].speculation


@setup
def one_optimizer(_: Path) -> Iterator[Names]:
    """A block that only makes the optimizer, which then trains."""
    yield from _one_optimizer()


@setup
def muon(_: Path) -> Iterator[Names]:
    """A block that makes Muon, which then trains; there is an AdamW group of two biases."""
    torch.manual_seed(0)
    model, batches = Net(), batches_of()
    before, names = copy.deepcopy(model), {"model": model}
    yield names
    matrices = [each for each in before.parameters() if each.ndim == 2]
    biases = [each for each in before.parameters() if each.ndim == 1]
    plain = PlainMuon(
        [{"params": matrices, "lr": 0.02}, {"params": biases, "use_muon": False, "lr": 3e-4, "weight_decay": 0.0}]
    )
    for batch in batches:
        for each in (model, before):
            each(batch).loss.backward()
        names["optimizer"].step()
        plain.step_on_grads()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@setup
def optimizer_ahead(_: Path) -> Iterator[Names]:
    """The same, and it steps ahead."""
    steps = _one_optimizer()
    names = next(steps)
    yield names
    assert next(steps, None) is None
    assert names["speculation"] is not None


@setup
def bf16_loop(_: Path) -> Iterator[Names]:
    """On the simulated device, which has gradients to hold."""
    offload = longshore.Offload(transfer=longshore.SimulatedTransfer(seed=3))
    yield {"model": Net(32).bfloat16(), "loader": [batch.bfloat16() for batch in batches_of()], "offload": offload}


@setup
def traced(_: Path) -> Iterator[Names]:
    model = Net()
    optimizer = longshore.AdamW(model.parameters())
    batches = iter(batches_of())

    def train_one_step() -> None:
        model(next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield {"optimizer": optimizer, "train_one_step": train_one_step}
    assert "<html" in Path("trace.html").read_text() and json.loads(Path("trace.json").read_text())


class WithLoss(nn.Module):
    """A model that returns its loss for a batch of samples and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.inner(batch[0].to(self.inner.weight.dtype)), batch[1])


def _labelled() -> Names:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(64, generator=generator), torch.tensor(place % 10)) for place in range(64)]
    return {"model": WithLoss(), "data": data}


@setup
def labelled(_: Path) -> Iterator[Names]:
    """A model and a dataset for an engine."""
    names = _labelled()
    before = copy.deepcopy(names["model"])
    yield names
    if any(isinstance(name, longshore.Engine) and name.global_steps for name in names.values()):
        weights = zip(names["model"].parameters(), before.parameters(), strict=True)
        assert not any(torch.equal(new, old) for new, old in weights)


@setup
def labelled_file(folder: Path) -> Iterator[Names]:
    """The same, with a configuration file in the folder."""
    shutil.copy(ROOT / "examples" / "ds_config.json", folder)
    with _SETUPS["labelled"](folder) as names:
        yield names
        assert names["engine"].global_steps == 4


@setup
def engine(_: Path) -> Iterator[Names]:
    names = _labelled()
    config = longshore.Config(micro_batch_size=8, gradient_clipping=1.0)
    made = longshore.initialize(
        model=names["model"], config=config, optimizer=longshore.AdamW(names["model"].parameters())
    )
    made.engine.backward(made.engine([torch.randn(8, 64), torch.zeros(8, dtype=torch.long)]))
    made.engine.step()
    yield {**names, "engine": made.engine}


@setup
def torchao_state(_: Path) -> Iterator[Names]:
    """A state as torchao's source makes it: an optimizer for each large parameter, and one for the small ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 48))
    twin = copy.deepcopy(model)
    large = [torch.optim.AdamW([p], lr=1e-4, fused=True) for p in twin.parameters() if p.numel() >= 4096]
    small = torch.optim.AdamW([p for p in twin.parameters() if p.numel() < 4096], lr=1e-4, fused=True)
    batches = batches_of(64)

    def train(batch: Tensor) -> None:
        twin(batch).square().sum().backward()
        for optimizer in (*large, small):
            optimizer.step()
            optimizer.zero_grad()

    for batch in batches[:-1]:
        train(batch)
    model.load_state_dict(twin.state_dict())
    saved = {"offloaded": [each.state_dict() for each in large], "on-device": small.state_dict()}
    names: Names = {"model": model, "saved": copy.deepcopy(saved)}
    yield names
    model(batches[-1]).square().sum().backward()
    names["optimizer"].step()
    train(batches[-1])
    assert len(large) == 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@setup
def zero3(folder: Path) -> Iterator[Names]:
    """A small Llama, its weights as safetensors, and a file for stage 3."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    there = folder / "folder" / "with" / "safetensors"
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(there)
        shutil.copytree(there, folder / "path" / "to" / "folder")
        (folder / "zero3.json").write_text(json.dumps(file))
    if dist.is_initialized():
        dist.barrier()
    names: Names = {
        "transformers": transformers,
        "config": config,
        "Model": transformers.AutoModelForCausalLM.from_config,
    }
    yield names
    tokens = torch.arange(8).reshape(1, 8)
    made = names["engine"]
    made.backward(made(tokens, labels=tokens).loss)
    made.step()
    assert made.was_step_applied()


@setup
def planned(folder: Path) -> Iterator[Names]:
    """The configuration of a model of 8 B parameters, and a function that makes a small one."""
    import transformers

    transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "llama-8b")
    shutil.copytree(folder / "llama-8b", folder / "model_folder")
    (folder / "my_package").mkdir()
    layers = "torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))"
    source = f"import torch\n\n\ndef make_model():\n    return {layers}\n"
    (folder / "my_package" / "models.py").write_text(source)
    yield {}
    for written in (folder / "plan").glob("ds_config.json"):
        longshore.engine.config.load_config(written)
    assert (folder / "plan" / "plan.png").exists()


@setup
def deepspeed_script(folder: Path) -> Iterator[Names]:
    """A script that says ``import deepspeed``, and its file."""
    scripts = ROOT / "tests" / "compat" / "scripts"
    shutil.copy(scripts / "finetune.py", folder / "train.py")
    shutil.copy(scripts / "toy.py", folder)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    yield {}
    assert (folder / "weights.1").exists()


@setup
def files(folder: Path) -> Iterator[Names]:
    """What the commands of the pages name: texts, a checkpoint of DeepSpeed's, a configuration, a script."""
    texts = folder / "my_texts"
    texts.mkdir()
    for source in sorted((ROOT / "src" / "longshore" / "engine").glob("*.py")):
        shutil.copy(source, texts / f"{source.stem}.txt")
    shutil.copytree(ROOT / "tests" / "compat" / "checkpoint_data" / "stage2_bf16", folder / "their_checkpoints")
    shutil.copy(ROOT / "examples" / "ds_config.json", folder)
    shutil.copy(ROOT / "examples" / "train_torchrun.py", folder / "train.py")
    yield {}
