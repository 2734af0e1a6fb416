"""Rows of figures and goals, as a table for people and as plain values for files."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

MET, MISSED, INFORMATION = "met", "MISSED", ""


@dataclass(frozen=True)
class Row:
    """One figure. Without a goal it is information; without a value, ``note`` says why there is none."""

    part: str
    what: str
    value: float | None
    unit: str
    goal: str = ""
    verdict: str = INFORMATION
    note: str = ""

    @property
    def shown_value(self) -> str:
        if self.value is None:
            return ""
        digits = f"{self.value:.0f}" if abs(self.value) >= 100 else f"{self.value:.3g}"
        return f"{digits} {self.unit}".rstrip()


def at_least(part: str, what: str, value: float, unit: str, goal: float, note: str = "") -> Row:
    """A figure that must not be lower than ``goal``."""
    return Row(part, what, value, unit, f">= {goal:g}", MET if value >= goal else MISSED, note)


def at_most(part: str, what: str, value: float, unit: str, goal: float, note: str = "") -> Row:
    """A figure that must not be higher than ``goal``."""
    return Row(part, what, value, unit, f"<= {goal:g}", MET if value <= goal else MISSED, note)


def equal(part: str, what: str, value: float, unit: str, goal: float, tolerance: float, note: str = "") -> Row:
    """A figure that must be ``goal`` to within ``tolerance``."""
    verdict = MET if abs(value - goal) <= tolerance else MISSED
    return Row(part, what, value, unit, f"{goal:g} +- {tolerance:g}", verdict, note)


def conclusion(rows: Sequence[Row]) -> str:
    """How many goals were missed, and what has no figure."""
    missed = f"{sum(row.verdict == MISSED for row in rows)} goals missed"
    without = [row.what for row in rows if row.value is None]
    return f"{missed}; not measured: {', '.join(without)}" if without else missed


def as_values(rows: Iterable[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> Table:
    """For the terminal; one block a part."""
    table = Table("measured", Column("value", justify="right"), Column("goal", justify="right"), "", "")
    part = None
    for row in rows:
        if row.part != part:
            part = row.part
            table.add_section()
            table.add_row(Text(part, style="bold"))
        color = {MET: "green", MISSED: "red"}.get(row.verdict, "")
        cells = (f"  {row.what}", row.shown_value, row.goal, row.verdict, row.note)
        # Text, because a note may hold brackets, which are markup in a str.
        table.add_row(*(Text(cell, style=color if cell == row.verdict else "") for cell in cells))
    return table


def as_markdown(rows: Sequence[Row], machine: Mapping[str, object], heading: str) -> str:
    """The same for docs/results."""
    lines = [f"# {heading}", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in machine.items()]
    part = None
    for row in rows:
        if row.part != part:
            part = row.part
            lines += ["", f"## {part}", "", "| measured | value | goal | | |", "|---|--:|--:|---|---|"]
        lines.append(f"| {row.what} | {row.shown_value} | {row.goal} | {row.verdict} | {row.note} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Measured:
    """``machine``: on what; ``parts``: all that was measured, by part; ``rows``: the figures of the table."""

    machine: Mapping[str, object]
    parts: Mapping[str, Any]
    rows: Sequence[Row]


def write_results(folder: Path, stem: str, hardware: str, measured: Measured) -> None:
    """``<stem>.json`` and ``<stem>.md`` in ``folder``; each appears whole or not at all."""
    today = datetime.date.today().isoformat()
    values = {
        "date": today,
        "machine": measured.machine,
        "rows": as_values(measured.rows),
        "parts": measured.parts,
    }
    write_whole(folder / f"{stem}.json", (json.dumps(values, indent=1) + "\n").encode())
    markdown = as_markdown(measured.rows, measured.machine, f"Benchmarks, {today}, {hardware}")
    write_whole(folder / f"{stem}.md", markdown.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Make or replace a file; whoever reads it finds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)
