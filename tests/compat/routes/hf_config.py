"""transformers' HfDeepSpeedConfig and ``from_pretrained`` at stage 3, before anything has joined the ranks.

Without deepspeed (``plain``), the same loop in torch, on the mean of the ranks' gradients.
"""

import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

how, pretrained, out = sys.argv[1:]
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
}
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + of_rank))


if how == "deepspeed":
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig(config)
    assert not torch.distributed.is_initialized()
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(3):
        ids = batch(step, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_16bit_model(out, "model.safetensors")
    engine.destroy()
elif rank == 0:
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    for step in range(3):
        gradients = []
        for each in range(world_size):
            optimizer.zero_grad()
            ids = batch(step, each)
            model(input_ids=ids, labels=ids).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(each) / world_size
        optimizer.step()
    os.makedirs(out)
    save_file(model.state_dict(), f"{out}/model.safetensors")
