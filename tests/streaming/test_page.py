"""The examples of docs/streaming.md, with a model of transformers: they train as without streaming."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from code_blocks import ROOT, Block, blocks_of
from on_device import device_type
from safetensors.torch import load_file
from torch import nn

import longshore
from longshore.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.medium]

BLOCKS = blocks_of(ROOT / "docs" / "streaming.md")


def only(language: str) -> Block:
    (found,) = [block for block in BLOCKS if block.language == language]
    return found


def make_model() -> transformers.LlamaForCausalLM:
    """As ``from_pretrained`` gives one: it would keep a cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=256))
    assert model.config.use_cache
    return model


def batches_of(rows: int) -> list[transformers.BatchEncoding]:
    generator = torch.Generator().manual_seed(3)
    every = [torch.randint(256, (rows, 7), generator=generator) for _ in range(3)]
    return [transformers.BatchEncoding({"input_ids": tokens, "labels": tokens}) for tokens in every]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in pairs)


def test_every_example_is_here() -> None:
    assert sorted(block.language for block in BLOCKS) == ["bash", "json", "python"]


def test_the_loop() -> None:
    source = only("python").text.replace('"cuda"', repr(device_type()))
    (stream,) = [line for line in source.splitlines() if line.startswith("longshore.stream(")]
    trained: list[Any] = []
    for text in (source, source.replace(stream, f"model.to({device_type()!r})")):
        names: dict[str, Any] = {"build_model": make_model, "batches": batches_of(2)}
        exec(text, names)
        trained.append(names["model"])
    assert same(*trained) and not same(trained[0], make_model().bfloat16())
    assert [next(each.parameters()).device.type for each in trained] == ["cpu", device_type()]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model().save_pretrained(tmp_path / "my_model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    monkeypatch.chdir(tmp_path)
    # torch's clipping adds up gradients on the CPU in another order than on the device; the optimizer's does not.
    small = (
        "--release-gradients --data text.txt --seq-len 16 --steps 3 --batch-size 2 --warmup 0 --eval-every 0 --device "
        + device_type()
    )
    line = only("bash").text.strip().removeprefix("longshore ")
    assert main(shlex.split(line) + shlex.split(small)) == 0
    without = line.replace("--stream ", "").replace("runs/large", "runs/other")
    assert main(shlex.split(without) + shlex.split(small)) == 0
    one, other = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("large", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_file() -> None:
    config = json.loads(only("json").text)
    without = copy.deepcopy(config)
    del without["zero_optimization"]["offload_param"]
    trained = []
    for each in (config, without):
        model = make_model()
        engine = longshore.initialize(model=model, config=each).engine
        for batch in batches_of(engine.train_micro_batch_size_per_gpu()):
            engine.backward(engine(**batch.to(device_type())).loss)
            engine.step()
        assert engine.global_steps == 3
        engine.destroy()
        trained.append(model)
    assert same(*trained) and not same(trained[0], make_model())
