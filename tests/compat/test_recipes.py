"""LLaMA-Factory and ms-swift with their own recipes and a DeepSpeed file, under ``longshore run-deepspeed``.

Each wants other versions of the same packages than these tests, so that it is not one of their requirements. In a venv
of its own: ``pip install llamafactory`` or ``pip install ms-swift``, and longshore. ``LONGSHORE_TOOLS`` names the venv.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compat.test_routes import AUTO, SCRIPTS, assert_same, weights

TOOLS = Path(os.environ.get("LONGSHORE_TOOLS", sys.prefix)) / "bin"

# LLaMA-Factory's examples of supervised fine-tuning and DPO, for a tiny model on the CPU.
LLAMA_FACTORY = """\
model_name_or_path: {folder}/model
do_train: true
dataset_dir: {folder}/data
template: alpaca
cutoff_len: 64
overwrite_cache: true
preprocessing_num_workers: 1
output_dir: {folder}/{name}
save_strategy: "no"
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 1.0e-3
num_train_epochs: 1.0
max_steps: 3
max_grad_norm: 0
lr_scheduler_type: cosine
warmup_ratio: 0.1
use_cpu: true
"""
LORA = "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
FULL = "finetuning_type: full\n"
SFT = "stage: sft\ndataset: tiny\n"
DPO = "stage: dpo\ndataset: pairs\npref_beta: 0.1\npref_loss: sigmoid\n"
SWIFT = (
    "--model {folder}/model --model_type llama --template dummy "
    "--torch_dtype float32 --fp16 false --bf16 false "
    "--max_steps 3 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 1e-3 "
    "--max_grad_norm 0 --save_strategy steps --save_steps 3 --max_length 64 --add_version false --use_cpu true "
    "--report_to none --use_hf true --split_dataset_ratio 0 --gradient_checkpointing false --dataset_num_proc 1 "
    "--dataloader_num_workers 0 --output_dir {folder}/{name}"
)
SWIFT_SFT = "sft --dataset {folder}/data/tiny.jsonl "
SWIFT_LORA = "--tuner_type lora --lora_rank 8 --target_modules all-linear "
SWIFT_FULL = "--tuner_type full "


def run(*command: str, **environ: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environ}
    env["PATH"] = f"{TOOLS}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def compare(tmp_path: Path, at: str) -> None:
    ours, plain = (weights(tmp_path / name / at) for name in ("ours", "plain"))
    assert_same(ours, plain)
    # The second matrix of an adapter starts as zeros.
    before = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in ours.items():
        assert bool(torch.count_nonzero(tensor)) and not (name in before and torch.equal(tensor, before[name])), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny model and data."""
    run(sys.executable, str(SCRIPTS / "trl_trainers.py"), "make", str(tmp_path / "model"))
    run(sys.executable, str(SCRIPTS / "make_chats.py"), str(tmp_path / "data"))
    return tmp_path


@pytest.mark.full
@pytest.mark.skipif(not (TOOLS / "llamafactory-cli").exists(), reason="needs pip install llamafactory")
@pytest.mark.parametrize(
    "ranks, stage, kind",
    [
        pytest.param(1, 2, SFT + LORA, id="1-stage2-lora"),
        pytest.param(2, 3, SFT + LORA, id="2-stage3-lora"),
        pytest.param(1, 2, SFT + FULL, id="1-stage2-full"),
        pytest.param(2, 3, SFT + FULL, id="2-stage3-full"),
        pytest.param(1, 2, DPO + FULL, id="1-stage2-dpo-full"),
        pytest.param(2, 3, DPO + LORA, id="2-stage3-dpo-lora"),
    ],
)
def test_llama_factory(ranks: int, stage: int, kind: str, folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**AUTO, "zero_optimization": {"stage": stage}}))
    recipe = LLAMA_FACTORY + kind
    (folder / "plain.yaml").write_text(recipe.format(folder=folder, name="plain"))
    (folder / "ours.yaml").write_text(recipe.format(folder=folder, name="ours") + f"deepspeed: {folder}/ds.json\n")
    # LLaMA-Factory starts its ranks with torchrun if told to.
    environ = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)}
    run("llamafactory-cli", "train", str(folder / "plain.yaml"), **environ)
    ours = [str(TOOLS / "python"), "-m", "longshore", "run-deepspeed"]
    run(*ours, "llamafactory-cli", "train", str(folder / "ours.yaml"), **environ)
    compare(folder, ".")


@pytest.mark.full
@pytest.mark.skipif(not (TOOLS / "swift").exists(), reason="needs pip install ms-swift")
@pytest.mark.parametrize(
    "ranks, file, kind",
    [
        pytest.param(1, "zero2_offload", SWIFT_SFT + SWIFT_LORA, id="1-stage2-lora"),
        pytest.param(2, "zero3", SWIFT_SFT + SWIFT_LORA, id="2-stage3-lora"),
        pytest.param(1, "zero2_offload", SWIFT_SFT + SWIFT_FULL, id="1-stage2-full"),
        pytest.param(2, "zero3", SWIFT_SFT + SWIFT_FULL, id="2-stage3-full"),
    ],
)
def test_ms_swift(ranks: int, file: str, kind: str, folder: Path) -> None:
    # ms-swift starts its ranks with torchrun if NPROC_PER_NODE is set. The files are its own.
    environ = {"NPROC_PER_NODE": str(ranks)}
    recipe = kind + SWIFT
    run("swift", *recipe.format(folder=folder, name="plain").split(), **environ)
    ours = [str(TOOLS / "python"), "-m", "longshore", "run-deepspeed"]
    run(*ours, "swift", *recipe.format(folder=folder, name="ours").split(), "--deepspeed", file, **environ)
    compare(folder, "checkpoint-3")
