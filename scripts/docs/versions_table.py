"""The tables of ``docs/stability.md`` about versions: what each feature needs, and which pairs are tested."""

from __future__ import annotations

from longshore.torch_versions import FEATURES, text_of
from scripts.check_versions import MATRIX
from scripts.docs.tile_table import BEGIN, END, filled_between


def table() -> str:
    """A row for each feature, and one for each Python with what it is tested with."""
    lines = ["| feature | oldest torch | older ones |", "|---|---|---|"]
    lines += [f"| {each.name} | {text_of(each.oldest)} | {each.why} |" for each in FEATURES.values()]
    lines += ["", "| Python | torch |", "|---|---|"]
    for python in dict.fromkeys(sorted((row[0] for row in MATRIX), key=lambda text: int(text.partition(".")[2]))):
        lines.append(f"| {python} | {', '.join(torch for other, torch in MATRIX if other == python)} |")
    return "\n".join([*lines, ""])


def filled(text: str) -> str:
    """The page with its tables as the code has them now."""
    return filled_between(text, f"{BEGIN}\n{table()}\n{END}")
