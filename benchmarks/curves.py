"""``python -m benchmarks.curves RUN ... --out FILE``: validation losses of several runs of ``longshore train`` in one
picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.output import METRICS
from longshore.cli.pictures import Series, loss_curves


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; a folder's name is its label.")],
    out: Annotated[Path, typer.Option(help="PNG file.")],
    title: Annotated[str, typer.Option(help="Above the axes.")] = "validation loss",
) -> None:
    """Draw the validation losses of runs."""
    series = []
    for run in runs:
        line = Series(run.name, marker="o")
        for text in (run / METRICS).read_text().splitlines():
            record = json.loads(text)
            if record["kind"] == "validation" and record["step"]:
                line.add(record["step"], record["loss"])
        series.append(line)
    out.write_bytes(loss_curves(series, title))


if __name__ == "__main__":
    typer.run(main)
