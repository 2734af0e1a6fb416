"""A training script on FSDP2's CPU offload, as people write them; nothing of longshore is in it.

torchrun --nproc-per-node=2 fsdp2.py --out runs/fsdp2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--load", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3)), nn.Linear(32, 32, bias=False))
    offload_policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=offload_policy)
    fully_shard(model, mesh=mesh, offload_policy=offload_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    first = 0
    if args.load:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=args.load)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        first = int(args.load.name)

    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 32, generator=generator).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=args.out / str(args.steps))
    weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        args.out.mkdir(exist_ok=True)
        torch.save(weights, args.out / "weights.pt")
    # A thread of gloo frees the tensors of the last gather a little later. If Python is shutting down by then, the
    # process ends with SIGABRT, in torch's own code.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
