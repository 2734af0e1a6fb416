"""Other tools' DeepSpeed integrations, unmodified, under ``longshore run-deepspeed``, beside the tools without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parent / "routes"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
TRAINER = [
    *("--max_steps", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_grad_norm", "0"),
    *("--report_to", "none", "--use_cpu", "--save_strategy", "no", "--disable_tqdm", "1"),
]

CLIPPING = ["--max_grad_norm", "0.3"]
ACCUMULATION = ["--gradient_accumulation_steps", "2"]
KEEPS_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False}
"""Without it Accelerate puts DeepSpeed's CPU Adam in the place of every optimizer that it does not know."""
BY_SGD = ["--optim", "sgd", "--learning_rate", "0.1"]
EVALUATION = [
    *("--eval_strategy", "steps", "--eval_steps", "2", "--eval_on_start", "1", "--load_best_model_at_end", "1"),
    *("--save_strategy", "steps", "--save_steps", "2"),
]


def start(*command: str, ranks: int = 1) -> subprocess.Popen[str]:
    launcher = TORCHRUN if ranks == 2 else []
    without = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED")
    environ = {name: value for name, value in os.environ.items() if name not in without}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *launcher, *command], env=environ, **pipes)  # pyright: ignore


def end(process: subprocess.Popen[str]) -> str:
    try:
        said = process.communicate(timeout=240)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def run(*command: str, ranks: int = 1) -> str:
    return end(start(*command, ranks=ranks))


def run_deepspeed(*command: str, ranks: int = 1) -> str:
    return run("-m", "longshore", "run-deepspeed", *command, ranks=ranks)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    name = "adapter_model" if (folder / "adapter_model.safetensors").exists() else "model"
    return load_file(folder / f"{name}.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max()
        assert difference <= within, f"{name}: {difference:.3g}"
        assert within > 0 or torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the weights from which ``from_pretrained`` starts."""
    folder = tmp_path_factory.mktemp("model")
    run(str(SCRIPTS / "trainer.py"), *TRAINER, "--max_steps", "1", "--output_dir", str(folder))
    return str(folder)


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A run of the Trainer with ``deepspeed=``, whose weights are those of the plain Trainer on as many ranks.

    Attributes:
        within: the largest difference of a weight; 0: none in any bit.
    """

    ranks: int
    stage: int
    arguments: list[str] = field(default_factory=list)
    within: float = 0.0
    pretrained: bool = True
    file: dict[str, Any] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        zero = {"stage": self.stage, "offload_optimizer": {"device": "cpu"}}
        return {**AUTO, "zero_optimization": zero, "bf16": {"enabled": "auto"}, **self.file}


# On two ranks, stages 2 and 3 add a window's backwards after the ranks', and DDP before. Adam would divide the
# difference by the root of its second moment, which is tiny where gradients are: one weight of 24,736 is 2.8e-6 apart.
ROWS = {
    "1-stage2": Row(1, 2, pretrained=False),
    "2-stage2": Row(2, 2, pretrained=False),
    "1-stage1": Row(1, 1),
    "1-stage3": Row(1, 3),
    "2-stage1-accumulation": Row(2, 1, ACCUMULATION),
    "2-stage2-accumulation": Row(2, 2, [*ACCUMULATION, *BY_SGD], 1e-6, file=KEEPS_OPTIMIZER),
    "2-stage3": Row(2, 3),
    "2-stage3-accumulation": Row(2, 3, [*ACCUMULATION, *BY_SGD], 1e-6, file=KEEPS_OPTIMIZER),
    "1-stage2-clipping": Row(1, 2, CLIPPING, within=1e-6),
    "1-stage2-optimizer-in-file": Row(1, 2, ["--warmup_steps", "2"], file={"optimizer": OPTIMIZER}),
    "1-stage2-evaluation": Row(1, 2, EVALUATION),
    "2-stage3-evaluation": Row(2, 3, EVALUATION),
    "1-stage2-lora": Row(1, 2, ["--lora", "1"]),
    "2-stage3-lora": Row(2, 3, ["--lora", "1"]),
}
SLOW = {"1-stage2", "1-stage3"}


def marked(name: str) -> Any:
    marks = [pytest.mark.slow if name in SLOW else pytest.mark.full]
    return pytest.param(ROWS[name], marks=marks, id=name)


@pytest.mark.parametrize("row", [*map(marked, ROWS)])
def test_the_trainer_equals_the_plain_trainer(row: Row, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(row.content()))
    start_from = ["--model", request.getfixturevalue("model")] if row.pretrained else []
    command = [str(SCRIPTS / "trainer.py"), *TRAINER, *start_from, *row.arguments, "--output_dir"]
    plain = start(*command, str(tmp_path / "plain"), ranks=row.ranks)
    run_deepspeed(*command, str(tmp_path / "ours"), "--deepspeed", str(file), ranks=row.ranks)
    end(plain)
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "plain"), row.within)


@pytest.mark.full
@pytest.mark.parametrize("ranks, stage", [(1, 2), (2, 3)])
def test_the_trainer_manages_accumulation_itself(ranks: int, stage: int, tmp_path: Path, model: str) -> None:
    """DeepSpeed refuses Accelerate's call with such a file, too: Accelerate declares each boundary."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(Row(ranks, stage, file={"managed_gradient_accumulation": False}).content()))
    command = ["--model", model, "--deepspeed", str(file), "--output_dir", str(tmp_path / "out")]
    process = start(
        "-m", "longshore", "run-deepspeed", str(SCRIPTS / "trainer.py"), *TRAINER, *command, *ACCUMULATION, ranks=ranks
    )
    said = process.communicate(timeout=240)[0]
    assert process.returncode != 0
    assert "with managed_gradient_accumulation false, every step() applies, and no boundary can be declared" in said
    assert "set it to true (Accelerate and transformers' Trainer make this call)" in said, said


@pytest.mark.full
@pytest.mark.parametrize("ranks, stage", [(1, 2), (2, 2), (2, 3)])
def test_the_trainer_resumes(ranks: int, stage: int, tmp_path: Path, model: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(Row(ranks, stage).content()))
    command = [str(SCRIPTS / "trainer.py"), *TRAINER, "--deepspeed", str(file), "--output_dir", str(tmp_path / "out")]
    command += ["--save_strategy", "steps", "--save_steps", "2"]
    run_deepspeed(*command, "--model", model, ranks=ranks)
    whole = weights(tmp_path / "out")
    # From other weights, so that a run that does not resume ends elsewhere.
    run_deepspeed(*command, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2"), ranks=ranks)
    assert_same(weights(tmp_path / "out"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_pretrained_weights_at_stage_3_before_the_ranks_have_joined(ranks: int, tmp_path: Path, model: str) -> None:
    script = str(SCRIPTS / "hf_config.py")
    plain = start(script, "plain", model, str(tmp_path / "plain"), ranks=ranks)
    run_deepspeed(script, "deepspeed", model, str(tmp_path / "ours"), ranks=ranks)
    end(plain)
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_resized_embeddings_and_a_reference_model_at_stage_3(ranks: int, tied: str, tmp_path: Path) -> None:
    script, pretrained = str(SCRIPTS / "resized.py"), str(tmp_path / "pretrained")
    run(script, "make", pretrained, tied)
    plain = start(script, "plain", pretrained, str(tmp_path / "plain"), ranks=ranks)
    run_deepspeed(script, "deepspeed", pretrained, str(tmp_path / "ours"), ranks=ranks)
    end(plain)
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "plain"))
    ours, theirs = (load_file(tmp_path / each / "logits.safetensors") for each in ("ours", "plain"))
    assert_same(ours, theirs)


# -- engines without an optimizer --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, stage", [pytest.param(1, 0, marks=pytest.mark.full), (2, 3), pytest.param(2, 0, marks=pytest.mark.full)]
)
def test_a_reference_model(ranks: int, stage: int) -> None:
    said = run_deepspeed(str(SCRIPTS / "reference.py"), str(stage), ranks=ranks)
    assert said.count("as expected") == ranks


# -- Accelerate with a DeepSpeedPlugin ---------------------------------------------------------------------------------


def compare_accelerated(tmp_path: Path, arguments: list[str], stage: int, ranks: int) -> None:
    def command(name: str) -> list[str]:
        given = [str(tmp_path / f"state_{name}") if each == "STATE" else each for each in arguments]
        return [str(SCRIPTS / "accelerated.py"), *given, "--out", str(tmp_path / name)]

    plain = start(*command("plain"), ranks=ranks)
    run_deepspeed(*command("ours"), "--deepspeed", str(stage), ranks=ranks)
    end(plain)
    assert_same(torch.load(tmp_path / "ours"), torch.load(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, arguments",
    [
        pytest.param(2, [], id="stage2", marks=pytest.mark.full),
        pytest.param(2, ["--dummies"], id="stage2-dummies"),
        pytest.param(3, ["--accumulation", "2"], id="stage3-accumulation", marks=pytest.mark.full),
        pytest.param(2, ["--state", "STATE"], id="stage2-state", marks=pytest.mark.full),
    ],
)
def test_accelerate_equals_its_plain_loop(stage: int, arguments: list[str], tmp_path: Path) -> None:
    compare_accelerated(tmp_path, arguments, stage, ranks=1)


@pytest.mark.full
@pytest.mark.parametrize(
    "stage, arguments",
    [
        pytest.param(1, ["--accumulation", "2"], id="stage1-accumulation"),
        pytest.param(2, ["--dummies"], id="stage2-dummies"),
        pytest.param(2, ["--state", "STATE"], id="stage2-state"),
        pytest.param(3, [], id="stage3"),
        pytest.param(3, ["--state", "STATE"], id="stage3-state"),
    ],
)
def test_accelerate_on_two_ranks(stage: int, arguments: list[str], tmp_path: Path) -> None:
    compare_accelerated(tmp_path, arguments, stage, ranks=2)


# -- accelerate launch with a DeepSpeed YAML ---------------------------------------------------------------------------

KEYS = """\
  zero_stage: {stage}
  gradient_accumulation_steps: 1
  gradient_clipping: 1000000.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
"""
YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
{keys}
machine_rank: 0
num_machines: 1
num_processes: {ranks}
main_process_port: 0
"""


@pytest.mark.full
@pytest.mark.parametrize("ranks, stage, by_file", [(1, 2, False), (2, 2, False), (2, 3, False), (2, 2, True)])
def test_accelerate_launch(ranks: int, stage: int, by_file: bool, tmp_path: Path) -> None:
    keys, arguments = KEYS.format(stage=stage), list[str]()
    if by_file:
        keys, arguments = f"  deepspeed_config_file: {tmp_path / 'ds.json'}", ["--dummies"]
        file: dict[str, Any] = {**AUTO, "gradient_clipping": 1e6, "gradient_accumulation_steps": 1}
        file["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        file["zero_optimization"] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        (tmp_path / "ds.json").write_text(json.dumps(file))
    (tmp_path / "ds.yaml").write_text(YAML.format(keys=keys, ranks=ranks))
    command = [str(SCRIPTS / "accelerated.py"), *arguments, "--out"]
    plain = start(*command, str(tmp_path / "plain"), ranks=ranks)
    # The program as pip has installed it, beside python.
    program = str(Path(sys.executable).with_name("accelerate"))
    run_deepspeed(program, "launch", "--config_file", str(tmp_path / "ds.yaml"), *command, str(tmp_path / "ours"))
    end(plain)
    assert_same(torch.load(tmp_path / "ours"), torch.load(tmp_path / "plain"))


# -- TRL ---------------------------------------------------------------------------------------------------------------

TRL = [
    *("--max_steps", "3", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_grad_norm", "0"),
    *("--report_to", "none", "--use_cpu", "--save_strategy", "no", "--disable_tqdm", "1"),
    *("--bf16", "0", "--gradient_checkpointing", "0"),
]
GRPO = ["--num_generations", "2", "--max_completion_length", "6", "--beta", "0.1"]


@pytest.mark.parametrize(
    "trainer, ranks, stage",
    [
        pytest.param("sft", 1, 2, marks=pytest.mark.full),
        pytest.param("sft", 2, 3, marks=pytest.mark.full),
        pytest.param("dpo", 1, 2, marks=pytest.mark.slow),
        pytest.param("dpo", 2, 3, marks=pytest.mark.full),
        pytest.param("grpo", 1, 2, marks=pytest.mark.full),
        pytest.param("grpo", 2, 3, marks=pytest.mark.full),
    ],
)
def test_trl(trainer: str, ranks: int, stage: int, tmp_path: Path) -> None:
    compare_trl(trainer, Row(ranks, stage), tmp_path)


@pytest.mark.parametrize(
    "trainer, ranks, optimizer",
    [
        pytest.param("dpo", 1, {"device": "cpu"}, marks=pytest.mark.slow),
        pytest.param("dpo", 2, {"device": "cpu"}, marks=pytest.mark.slow),
        pytest.param("dpo", 2, {"device": "none"}, marks=pytest.mark.full),
        pytest.param("grpo", 2, {"device": "cpu"}, marks=pytest.mark.full),
    ],
)
def test_trl_with_parameters_on_the_host(trainer: str, ranks: int, optimizer: dict[str, str], tmp_path: Path) -> None:
    """Those of the reference model too, for which TRL leaves out the optimizer and where its state is."""
    on_host = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": optimizer}
    compare_trl(trainer, Row(ranks, 3, file={"zero_optimization": on_host}), tmp_path)


def compare_trl(trainer: str, row: Row, tmp_path: Path) -> None:
    file, model, ranks = tmp_path / "ds.json", str(tmp_path / "model"), row.ranks
    file.write_text(json.dumps(row.content()))
    script = str(SCRIPTS / "trl_trainers.py")
    run(script, "make", model)
    command = [script, trainer, model, *TRL, *(GRPO if trainer == "grpo" else []), "--output_dir"]
    plain = start(*command, str(tmp_path / "plain"), ranks=ranks)
    run_deepspeed(*command, str(tmp_path / "ours"), "--deepspeed", str(file), ranks=ranks)
    end(plain)
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "plain"))
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "ours").items())
