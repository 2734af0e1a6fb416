"""``longshore demo``: the same training with longshore and with plain PyTorch, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.settings import SIZES


def demo(
    size: Annotated[str, typer.Option(help=f"{', '.join(SIZES)}.")] = "small",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 60,
    seconds: Annotated[
        float | None, typer.Option(help="Choose the number of steps so that all runs together take about so long.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Sequences a backward; there are two backwards a step.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the data.")] = 0,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of plain text; repeatable. Default: Python's standard library."),
    ] = None,
    two_ranks: Annotated[
        bool,
        typer.Option(
            "--two-ranks/--no-two-ranks",
            help="Also on two ranks, sharded by ZeRO-1, 2 and 3; one is killed and resumed.",
        ),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Write the loss curves to this PNG file.")] = None,
) -> None:
    """Train with longshore and with plain PyTorch, in fp32, in bf16 and on two ranks, and compare.

    One run on two ranks is killed half way and goes on from its checkpoint.

    Ends with 1 if any weight differs in any bit.
    """
    from longshore.cli.comparison import DemoSettings, run

    settings = DemoSettings(size, steps, seconds, seq_len, batch_size, seed, tuple(data or ()), out, two_ranks)
    raise typer.Exit(run(settings))
