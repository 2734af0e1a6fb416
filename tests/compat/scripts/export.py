"""Stage 3 from the model's first weights to a file of whole ones: ``zero.Init``, a checkpoint, ``zero_to_fp32``."""

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch import nn
from toy import Net, batch

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
deepspeed.init_distributed()
rank = torch.distributed.get_rank()
torch.manual_seed(8)
with deepspeed.zero.Init(config_dict_or_path=ds_config):
    model = Net()
with deepspeed.zero.GatheredParameters([model.last.weight, model.last.bias], modifier_rank=0):
    if rank == 0:
        nn.init.normal_(model.last.weight, std=0.02)
        nn.init.zeros_(model.last.bias)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)


def train(steps):
    losses = []
    for step in steps:
        x, y = (each.bfloat16() for each in batch(step, rank))
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


losses = train(range(args.steps // 2))
folder = f"{args.out}-checkpoints"
engine.save_checkpoint(folder, client_state={"seen": args.steps // 2})
dropped = train([99])
path, client_state = engine.load_checkpoint(folder)
assert path is not None and os.path.isdir(path)
losses += train(range(client_state["seen"], args.steps))
engine.save_checkpoint(folder, tag="last")
engine.save_16bit_model(folder, "pytorch_model.bin")
torch.distributed.barrier()
with deepspeed.zero.GatheredParameters(engine.module.parameters()):
    gathered = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
saved = {"losses": losses, "dropped": dropped, "gathered": gathered}
if rank == 0:
    saved["weights"] = get_fp32_state_dict_from_zero_checkpoint(folder)
    convert_zero_checkpoint_to_fp32_state_dict(folder, f"{args.out}-whole", tag="last")
    saved["whole"] = torch.load(f"{args.out}-whole/pytorch_model.bin")
    saved["bf16"] = torch.load(f"{folder}/pytorch_model.bin")
    saved["model"] = load_state_dict_from_zero_checkpoint(Net(), folder).state_dict()
torch.save(saved, f"{args.out}.{rank}")
torch.distributed.barrier()
engine.destroy()
