"""The same scripts, unmodified, once with DeepSpeed itself and once under ``longshore run-deepspeed``, on the CPU.

DeepSpeed is not one of these tests' requirements. ``LONGSHORE_DEEPSPEED`` names a venv that has it and the tools:
``pip install deepspeed transformers accelerate trl peft``, with the same torch, and a C++ compiler.

The file asks for gradients that are added and sent in float32, as longshore does: in bf16, DeepSpeed rounds the sums
of backwards and of ranks otherwise. It has no ``train_batch_size``, because at stage 3 DeepSpeed makes the model before
it counts the ranks where there is no CUDA, and refuses a batch size of several ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from compat.test_bf16_routes import losses
from compat.test_routes import AUTO, OPTIMIZER, SCRIPTS, TRAINER, assert_same, run, run_deepspeed, start

VENV = Path(os.environ.get("LONGSHORE_DEEPSPEED", ""))
DEEPSPEED = VENV / "bin" / "deepspeed"
WITHIN = 1e-6

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not DEEPSPEED.exists(), reason="needs LONGSHORE_DEEPSPEED, a venv with DeepSpeed"),
]


def file(folder: Path, stage: int, **more: Any) -> str:
    offload = {"offload_optimizer": {"device": "cpu"}} if stage else {}
    content = {key: value for key, value in AUTO.items() if key != "train_batch_size"}
    content |= {"zero_optimization": {"stage": stage, **offload}, "zero_force_ds_cpu_optimizer": False}
    content |= {"bf16": {"enabled": "auto"}, "communication_data_type": "fp32"}
    content |= {"data_types": {"grad_accum_dtype": "fp32"}, **more}
    (folder / "ds.json").write_text(json.dumps(content))
    return str(folder / "ds.json")


def start_theirs(*command: str, ranks: int) -> subprocess.Popen[str]:
    """Start with DeepSpeed itself, whose single rank needs a launcher too."""
    without = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED")
    environ = {name: value for name, value in os.environ.items() if name not in without}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = (str(VENV / "bin" / "python"), *launcher, *command)
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_theirs(process: subprocess.Popen[str], ranks: int) -> str:
    """Wait for a run that has to reach its last line; DeepSpeed's processes sometimes abort while they exit."""
    try:
        said = process.communicate(timeout=240)[0]
    finally:
        process.kill()
    assert len(losses(said)) == ranks, said
    return said


def compare(command: list[str], ranks: int, ours: list[str], theirs: list[str]) -> None:
    process = start_theirs(*command, *theirs, ranks=ranks)
    found = losses(run_deepspeed(*command, *ours, ranks=ranks))
    expected = losses(end_theirs(process, ranks))
    assert sorted(found) == sorted(expected) == list(range(ranks))
    for rank, values in expected.items():
        assert len(found[rank]) == len(values) >= 3 and len(set(values)) >= 3
        assert max(abs(mine - his) for mine, his in zip(found[rank], values, strict=True)) <= WITHIN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    run(str(SCRIPTS / "trainer.py"), *TRAINER, "--max_steps", "1", "--output_dir", str(folder))
    return str(folder)


ACCUMULATION = ["--gradient_accumulation_steps", "2"]
# DeepSpeed rounds the coefficient otherwise (see differences.py): the last digit of a few masters differs, and sooner
# or later one of these rounds to another bfloat16 weight, which is 2^-8 away. So only two steps of these.
CLIPPING = [*ACCUMULATION, "--max_grad_norm", "0.3"]
BF16 = ["--bf16", "1"]
VARIANTS = [
    pytest.param([], id="fp32"),
    pytest.param(CLIPPING, id="fp32-accumulation-clipping"),
    pytest.param(BF16, id="bf16"),
    pytest.param([*BF16, *ACCUMULATION], id="bf16-accumulation"),
    pytest.param([*BF16, *CLIPPING, "--max_steps", "2"], id="bf16-accumulation-clipping"),
]


def masters(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ours, theirs = (torch.load(folder / name / "masters.pt") for name in ("ours", "theirs"))
    return ours, theirs


@pytest.mark.parametrize("more", VARIANTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer(ranks: int, stage: int, more: list[str], tmp_path: Path, model: str) -> None:
    command = [str(SCRIPTS / "trainer.py"), *TRAINER, "--model", model, *more]
    command += ["--deepspeed", file(tmp_path, stage), "--output_dir"]
    compare(command, ranks, [str(tmp_path / "ours")], [str(tmp_path / "theirs")])
    # Where nothing is clipped, DeepSpeed's stages 1 and 2 step by torch's AdamW on the same gradients. Those of the
    # others differ in the last digit (see differences.py), and AdamW divides them by the root of its second moment,
    # which is tiny for a few: one float32 weight of 24,736 is 2.9e-6 away after four steps.
    exact = stage < 3 and "--max_grad_norm" not in more
    assert_same(*masters(tmp_path), 0.0 if exact else WITHIN if "--bf16" in more else 1e-5)


def optimizer(**more: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {**OPTIMIZER["params"], **more}}


OF_THE_FILE = [
    pytest.param([], optimizer(), id="fp32-cpu-adam"),
    pytest.param(CLIPPING, optimizer(torch_adam=True), id="fp32-accumulation-clipping-torch-adam"),
]


@pytest.mark.parametrize(
    "more, optimizer", [*(pytest.param(*row.values, None, id=row.id) for row in VARIANTS), *OF_THE_FILE]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_without_the_known_differences(
    ranks: int, stage: int, more: list[str], optimizer: dict[str, Any] | None, tmp_path: Path, model: str
) -> None:
    """Nothing else differs: the order in which stage 3 adds gradients, the coefficient of clipping, and the Adam."""
    content = {"optimizer": optimizer} if optimizer else {}
    command = [str(SCRIPTS / "trainer.py"), *TRAINER, "--model", model, "--weight_decay", "0.01", *more]
    command += ["--deepspeed", file(tmp_path, stage, **content), "--output_dir"]
    ours = [str(tmp_path / "ours"), "--pass_through", str(int(stage == 3))]
    compare(command, ranks, ours, [str(tmp_path / "theirs"), "--compute_as_torch", "1"])
    assert_same(*masters(tmp_path))


# -- going on from what DeepSpeed saved --------------------------------------------------------------------------------


def refused(command: list[str], ranks: int, root: Path, tag: str = "") -> None:
    """The run ends, and says how to convert the folder."""
    process = start("-m", "longshore", "run-deepspeed", *command, ranks=ranks)
    said = process.communicate(timeout=240)[0]
    assert process.returncode != 0
    assert f"is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out FOLDER{tag}`" in said, said


def converted(root: Path, tag: str, out: Path) -> str:
    """Do what the error says."""
    run("-m", "longshore", "import-deepspeed", str(root), "--out", str(out), "--tag", tag)
    for each in root.iterdir():
        if each.is_file():
            shutil.copy(each, out)
    return str(out)


@pytest.mark.parametrize("bf16", ["0", "1"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks, stage", [(1, 2), (2, 2), (2, 3)])
def test_the_trainer_goes_on_from_deepspeeds_folder(
    ranks: int, stage: int, bf16: str, tmp_path: Path, model: str
) -> None:
    command = [str(SCRIPTS / "trainer.py"), *TRAINER, "--bf16", bf16, "--save_strategy", "steps", "--save_steps", "2"]
    command += ["--deepspeed", file(tmp_path, stage), "--output_dir"]
    end_theirs(start_theirs(*command, str(tmp_path / "theirs"), "--model", model, ranks=ranks), ranks)
    saved = tmp_path / "theirs" / "checkpoint-2"
    # From other weights, so that a run that does not resume ends elsewhere.
    command += [str(tmp_path / "ours"), "--resume_from_checkpoint"]
    refused([*command, str(saved)], ranks, saved)
    run_deepspeed(*command, converted(saved, "global_step2", tmp_path / "checkpoint-2"), ranks=ranks)
    ours, theirs = (torch.load(tmp_path / name / "masters.pt") for name in ("ours", "theirs"))
    assert_same(ours, theirs, WITHIN)


@pytest.mark.parametrize("ranks, stage", [(1, 2), (2, 3)])
def test_accelerate_goes_on_from_deepspeeds_folder(ranks: int, stage: int, tmp_path: Path) -> None:
    command = [str(SCRIPTS / "accelerated.py"), "--deepspeed", str(stage), "--out"]
    saved = tmp_path / "state"
    end_theirs(start_theirs(*command, str(tmp_path / "theirs"), "--state", str(saved), ranks=ranks), ranks)
    command += [str(tmp_path / "ours"), "--load"]
    refused([*command, str(saved)], ranks, saved, " --tag pytorch_model")
    run_deepspeed(*command, converted(saved, "pytorch_model", tmp_path / "converted"), ranks=ranks)
    ours, theirs = (torch.load(tmp_path / f"{name}.masters") for name in ("ours", "theirs"))
    assert_same(ours, theirs, WITHIN)
