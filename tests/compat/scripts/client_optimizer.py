"""An optimizer and a scheduler of one's own, in bf16, with groups: decay for matrices only."""

import argparse
import math

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import RepeatingLoader, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.utils.data import DataLoader, DistributedSampler
from toy import samples, seeded_net

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--offload", action="store_true")
args = parser.parse_args()

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu" if args.offload else "none"}},
}
deepspeed.init_distributed(dist_backend=deepspeed.get_accelerator().communication_backend_name())
model = seeded_net(2).to(torch.bfloat16)
matrices = [each for each in model.parameters() if each.ndim > 1]
others = [each for each in model.parameters() if each.ndim <= 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
kind = DeepSpeedCPUAdam if args.offload else FusedAdam
optimizer = kind(groups, lr=3e-3, betas=(0.9, 0.95))
assert isinstance(optimizer, kind)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
)
model, optimizer, _, schedule = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config, dist_init_required=False
)
data = samples(32, seed=5)
loader = RepeatingLoader(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)))
losses = []
for _ in range(args.steps):
    x, y = next(loader)
    loss = F.mse_loss(model(x.to(model.device, torch.bfloat16)), y.to(model.device, torch.bfloat16))
    model.backward(loss)
    model.step()
    losses.append(loss.item())
weights = {name: safe_get_full_fp32_param(each) for name, each in model.module.named_parameters()}
moment = safe_get_full_optimizer_state(model.module.first.weight, "exp_avg")
saved = {"losses": losses, "weights": weights, "moment": moment, "lr": model.get_lr()}
torch.save(saved, f"{args.out}.{torch.distributed.get_rank()}")
