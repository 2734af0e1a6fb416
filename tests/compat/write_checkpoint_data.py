"""Writes ``checkpoint_data``: checkpoints that DeepSpeed saved, each with what its own utilities say was in it.

Where DeepSpeed 0.19 is installed::

    DS_ACCELERATOR=cpu python write_checkpoint_data.py checkpoint_data

Each case is a run of its own, of one or two processes; names after the folder choose some. Tests import the model and
the groups from here, and nothing of DeepSpeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Its utilities mix up the parameters of a group that is dealt out to ranks in turn, unless that group is aligned.
CASES: dict[str, dict[str, Any]] = {
    "stage1_fp32": {"stage": 1, "client": True},
    "stage1_bf16_two_ranks": {"stage": 1, "dtype": "bf16", "ranks": 2},
    "stage1_bf16_offload": {"stage": 1, "dtype": "bf16", "offload": True},
    "stage2_fp32_offload_two_ranks": {"stage": 2, "offload": True, "ranks": 2},
    "stage2_bf16": {"stage": 2, "dtype": "bf16", "schedule": True},
    "stage2_bf16_two_ranks": {"stage": 2, "dtype": "bf16", "ranks": 2, "round_robin": True, "aligned": True},
    "stage2_fp16": {"stage": 2, "dtype": "fp16", "decoupled": False},
    "stage3_fp32": {"stage": 3, "torch_adam": True},
    "stage3_bf16_two_ranks": {"stage": 3, "dtype": "bf16", "ranks": 2, "schedule": True},
    "stage3_bf16_offload_two_ranks": {"stage": 3, "dtype": "bf16", "ranks": 2, "offload": True, "sub_group": 20},
    "stage2_bf16_not_stepped": {"stage": 2, "dtype": "bf16", "steps": 0},
}
STEPS = 3


class Model(nn.Module):
    """Tied, frozen, a buffer, two groups, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.inner = nn.Linear(5, 3)
        self.outer = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding(words)
        hidden = self.norm(hidden + self.frozen(hidden))
        hidden = hidden + self.outer(torch.tanh(self.inner(hidden))) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), words.flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and what does not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": case["stage"],
        "round_robin_gradients": case.get("round_robin", False),
        "parameter_alignment": case.get("aligned", False),
    }
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if case["stage"] == 3:
        zero |= {"sub_group_size": case.get("sub_group", 10**9), "stage3_param_persistence_threshold": 4}
    optimizer: dict[str, Any] = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    if case.get("torch_adam"):
        optimizer["torch_adam"] = True
    if not case.get("decoupled", True):
        optimizer["adam_w_mode"] = False
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
    }
    if not case.get("client"):
        config["optimizer"] = {"type": "Adam", "params": optimizer}
    if case.get("dtype"):
        config[case["dtype"]] = {"enabled": True} | ({"initial_scale_power": 8} if case["dtype"] == "fp16" else {})
    if case.get("schedule"):
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}}
    return config


def run(name: str, folder: Path) -> None:
    """In each process of a case."""
    import deepspeed
    from safetensors.torch import save_file

    case = CASES[name]
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    model = Model()
    names = {parameter: key for key, parameter in model.named_parameters()}
    if case.get("dtype") == "fp16":
        # DeepSpeed refuses it on hosts without instructions for it; torch is slower there, and no worse.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    client = torch.optim.AdamW(groups_of(model), lr=2e-3, eps=1e-6) if case.get("client") else None
    listed = groups_of(model) if client is None else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=client, model_parameters=listed, config=config_of(case))
    torch.manual_seed(10 + rank)
    for _ in range(case.get("steps", STEPS) * 2):
        engine.backward(engine(torch.randint(7, (2, 4))))
        engine.step()
    words = {"epoch": 2, "best": torch.tensor([0.25]), "names": ("a", "b"), "words": {"x"}}
    engine.save_checkpoint(str(folder), client_state=words)
    found = expected_of(engine, names)
    if rank == 0:
        save_file(found, folder / "expected.safetensors")
        for script in folder.glob("*.py"):
            script.unlink()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def expected_of(engine: Any, names: dict[Any, str]) -> dict[str, Any]:
    """What DeepSpeed says that each parameter is, whole."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = {int(state["step"]) for state in inner.state.values()} or {0}
    assert len(steps) == 1, steps
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked") and steps != {0}:
        # DeepSpeed links them when the first group has been stepped, and the second one then has no moments to ask for.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, name in names.items():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"{name} weight"] = parameter.detach().clone()
        if parameter.requires_grad:
            found[f"{name} master"] = safe_get_full_fp32_param(parameter).clone().view(found[f"{name} weight"].shape)
            for key in ("exp_avg", "exp_avg_sq") if steps != {0} else ():
                state = safe_get_full_optimizer_state(parameter, key)
                found[f"{name} {key}"] = state.clone().view(found[f"{name} weight"].shape)
    found["step"] = torch.tensor(*steps)
    found["calls"] = engine.module.calls.clone()
    found["lr"] = torch.tensor(engine.get_lr(), dtype=torch.float64)
    return found


def write(name: str, out: Path) -> None:
    """One case, in processes of its own."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = CASES[name].get("ranks", 1)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, __file__, "--case", name, str(folder)], env=environ, check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        run(sys.argv[2], Path(sys.argv[3]))
    else:
        for each in sys.argv[2:] or CASES:
            write(each, Path(sys.argv[1]))
