"""A training script for one GPU, as people write them; nothing of longshore is in it.

It accumulates, clips, schedules its learning rate, and writes a checkpoint from which it goes on.
"""

import argparse
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after this step, as if the job had ended")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
    model.to(args.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=args.steps)

    checkpoint = args.out / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=args.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]

    for step in range(first, args.until or args.steps):
        for part in range(2):
            generator = torch.Generator().manual_seed(10 * step + part)
            tokens = torch.randint(64, (4, 17), generator=generator).to(args.device)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {2 * loss.item():.6f}, norm {norm.item():.6f}")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "step": step + 1,
            },
            checkpoint,
        )
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, args.out / "weights.pt")


if __name__ == "__main__":
    main()
