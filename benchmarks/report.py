"""Rows of figures and goals, as a table for people and as plain values for files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

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


def as_markdown(rows: Sequence[Row], machine: dict[str, object], heading: str) -> str:
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
