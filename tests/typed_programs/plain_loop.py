"""docs/index.md and docs/optimizer.md: a loop of your own, in both modes, with groups and state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import longshore


def backward(model: nn.Module, batch: Tensor) -> float:
    loss: Tensor = model(batch).square().mean()
    loss.backward()  # pyright: ignore[reportUnknownMemberType]  # torch has no annotations there
    return loss.item()


def main() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = longshore.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    with longshore.trace(optimizer) as trace:
        for _ in range(2):
            backward(model, torch.randn(8, 64))
            norm: Tensor = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert norm.item() > 0
    summary = trace.summary()
    seconds: float | None = summary.step_s
    state_bytes: int = optimizer.host_bytes()["state"]
    assert summary.steps == 2 and state_bytes > 0 and seconds != 0
    saved = optimizer.state_dict()
    optimizer.close()

    released = longshore.Adam(model.parameters(), lr=1e-4, release_gradients=True)
    released.load_state_dict(longshore.Adam(model.parameters()).state_dict())
    backward(model, torch.randn(8, 64))
    released.step()
    if (record := released.speculation) is not None:
        assert record.begun >= record.kept
    released.close()

    muon = longshore.Muon(longshore.muon_groups(model, show=False), lr=0.02)
    backward(model, torch.randn(8, 64))
    muon.step()
    ours = longshore.from_client(torch.optim.AdamW(model.parameters(), lr=1e-3))
    ours.step()
    assert set(saved) == {"state", "param_groups"}


if __name__ == "__main__":
    main()
