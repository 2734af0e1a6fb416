"""Somebody with transformers' Trainer and a DeepSpeed file: the script as it is, and with longshore's Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from walks.running import readme_says, run, same, written

AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
FILE = {
    **dict.fromkeys(AUTO, "auto"),
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True},
}
ARGUMENTS = (
    *("--max_steps", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_grad_norm", "0"),
    *("--report_to", "none", "--use_cpu", "--save_strategy", "steps", "--save_steps", "2", "--disable_tqdm", "1"),
)
IMPORT = (
    (
        "LlamaForCausalLM, Trainer, TrainingArguments",
        "LlamaForCausalLM, TrainingArguments",
    ),
    ("import torch\n", "import torch\nfrom longshore.integrations.transformers import Trainer\n"),
)


@pytest.mark.slow
def test_the_file_and_the_script_train_as_the_plain_trainer(tmp_path: Path) -> None:
    readme_says(
        "longshore run-deepspeed train.py --deepspeed ds.json",
        "from longshore.integrations.transformers import Trainer  # was: from transformers import Trainer",
    )
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FILE))
    script = written("hf_trainer.py", tmp_path)
    run(script, *ARGUMENTS, "--output_dir", tmp_path / "plain")
    expected = load_file(tmp_path / "plain/model.safetensors")

    unmodified = ("-m", "longshore", "run-deepspeed", script, *ARGUMENTS, "--deepspeed", file, "--output_dir")
    ours = tmp_path / "ours"
    run(*unmodified, ours)
    assert same(load_file(ours / "model.safetensors"), expected)
    run(*unmodified, tmp_path / "resumed", "--resume_from_checkpoint", ours / "checkpoint-2")
    assert same(load_file(tmp_path / "resumed/model.safetensors"), expected)

    config = ("train_dataset=Tokens(32))", f"train_dataset=Tokens(32), config={str(file)!r})")
    run(written("hf_trainer.py", tmp_path, *IMPORT, config), *ARGUMENTS, "--output_dir", tmp_path / "changed")
    assert same(load_file(tmp_path / "changed/model.safetensors"), expected)
