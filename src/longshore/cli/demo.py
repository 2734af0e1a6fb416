"""``longshore demo``. The work is in comparison.py, which is imported only to do it."""

from __future__ import annotations

import typer

from longshore.cli.options import CommandLine, takes
from longshore.cli.settings import DemoSettings


@takes(DemoSettings)
def demo(line: CommandLine) -> None:
    """Train with longshore and with plain PyTorch, in fp32, in bf16 and on two ranks, and compare.

    One run on two ranks is killed half way and continued from its checkpoint.

    The exit code is 1 if any weight differs in any bit.
    """
    settings = line.settings(DemoSettings)
    from longshore.cli.comparison import run

    raise typer.Exit(run(settings))
