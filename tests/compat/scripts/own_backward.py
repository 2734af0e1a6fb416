"""Backwards that the script calls itself, in fp16, two of them a step: ``engine.scale(loss).backward()``."""

import argparse
import json
import os

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from toy import batch, seeded_net

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

config = json.loads(
    """{
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.01}},
        "fp16": {"enabled": true, "loss_scale": 128},
        "zero_optimization": {"stage": 1}
    }"""
)
engine, *_ = deepspeed.initialize(model=seeded_net(5), config=config)
assert engine.fp16_enabled() and not engine.dynamic_loss_scale() and engine.zero_optimization_stage() == 1
rank = torch.distributed.get_rank()
losses, norms = [], []
for step in range(args.steps):
    x, y = (each.half() for each in batch(step, rank))
    with engine.coalesce_grad_reduction() if step % 2 else engine.no_sync():
        first = F.mse_loss(engine(x), y)
        engine.scale(first).backward()
    second = F.l1_loss(engine(x), y)
    engine.scale(second).backward()
    norms.append(safe_get_full_grad(engine.module.last.bias).norm().item())
    engine.step()
    assert engine.was_step_applied()
    losses.append([first.item(), second.item()])
weights = {name: safe_get_full_fp32_param(each) for name, each in engine.module.named_parameters()}
torch.save({"losses": losses, "weights": weights, "norms": norms}, f"{args.out}.{rank}")
engine.destroy()
