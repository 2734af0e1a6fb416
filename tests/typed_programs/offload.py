"""docs/optimizer.md and docs/states.md: settings of the host side, and errors by their classes."""

from __future__ import annotations

import torch
from torch import nn

import longshore


def main() -> None:
    model = nn.Linear(64, 64)
    offload = longshore.Offload(
        tile_numel=1024,
        threads=1,
        speculation_memory="25%",
        states="bf16",
        transfer=longshore.SimulatedTransfer(seed=1),
    )
    threads: int | None = offload.threads
    optimizer = longshore.Lion(model.parameters(), lr=1e-4, release_gradients=True, offload=offload)
    model(torch.randn(8, 64)).square().mean().backward()
    try:
        optimizer.step()
    except longshore.GradientError as error:
        print(f"nothing was stepped with {threads} threads: {error}")
        optimizer.zero_grad()
    except longshore.LongshoreError:
        raise
    optimizer.close()
    kept = longshore.SGD(model.parameters(), lr=0.1, momentum=0.9, offload=longshore.Offload(device="none"))
    kept.step()
    kept.close()


if __name__ == "__main__":
    main()
