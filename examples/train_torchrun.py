"""A script written for DeepSpeed, after the move: it says ``longshore`` where it said ``deepspeed``, and that is all.

    torchrun --nproc-per-node=2 examples/train_torchrun.py
    python examples/train_torchrun.py

The configuration file is DeepSpeed's own JSON.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import longshore


class Digits(Dataset):
    """Vectors whose label is the place of their largest entry."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index, :10].argmax()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--checkpoints", help="folder to save to, and to go on from")
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    engine, _, loader, _ = longshore.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Digits(args.samples)
    )
    first = 0
    if args.checkpoints:
        with contextlib.suppress(longshore.NoCheckpointError):  # at the first start
            _, client_state = engine.load_checkpoint(args.checkpoints)
            first = client_state["epoch"] + 1
            if engine.global_rank == 0:
                print(f"{first} of {args.epochs} epochs are done")
    for epoch in range(first, args.epochs):
        for x, label in loader:
            loss = nn.functional.cross_entropy(engine(x.to(engine.device)), label.to(engine.device))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, {engine.global_steps} steps, lr {engine.get_lr()[0]:.1e}")
        if args.checkpoints:
            engine.save_checkpoint(args.checkpoints, client_state={"epoch": epoch}, keep_last=2)
    engine.destroy()


if __name__ == "__main__":
    main()
