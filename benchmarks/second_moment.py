"""``python -m benchmarks.second_moment --out FILE``: a second moment whose gradients become smaller, in each format.

The gradient of every element is 1 for some steps and then a tenth. The second moment should fall to a hundredth of what
it was. Rounded to nearest in bfloat16, as DeepSpeed keeps it, it stays where it is: a step changes it by a thousandth,
which is less than half a unit in the last place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import longshore
from longshore.cli.pictures import Series, loss_curves

ROWS, COLUMNS = 64, 64
FIRST_STEPS, STEPS, EVERY = 200, 4000, 40
NEAREST = "bf16, rounded to nearest"


def series_of(states: str, label: str) -> Series:
    """Return the mean second moment of the elements of one parameter, every few steps."""
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    nearest = label == NEAREST
    optimizer = longshore.AdamW(
        [weight], lr=0.0, betas=(0.9, 0.999), offload=longshore.Offload(states=states, threads=1)
    )
    line = Series(label)
    for step in range(1, STEPS + 1):
        weight.grad = torch.full_like(weight, 1.0 if step <= FIRST_STEPS else 0.1)
        optimizer.step()
        moment = optimizer.state[weight]["exp_avg_sq"]
        if nearest:
            moment.copy_(moment.bfloat16())
        if step % EVERY == 0:
            line.add(step, moment.mean().item())
    return line


def main(out: Annotated[Path, typer.Option(help="PNG file.")]) -> None:
    """Draw the second moments of all formats, and print where they end."""
    kinds = [("fp32", "fp32"), ("bf16", "bf16"), ("8bit", "8bit"), ("fp32", NEAREST)]
    lines = [series_of(states, label) for states, label in kinds]
    for line in lines:
        print(f"{line.label}: {line.losses[-1]:.4g}")
    out.write_bytes(loss_curves(lines, "second moment; the gradient is 1, then 0.1", "exp_avg_sq"))


if __name__ == "__main__":
    typer.run(main)
