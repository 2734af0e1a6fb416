"""The table of a tile's moves in ``docs/how_it_works.md``, from the table in the code."""

from __future__ import annotations

import re

from longshore.tiles.tile import TRANSITIONS, TileEvent, TileState

BEGIN, END = "<!-- Generated: python -m scripts.docs -->\n", "<!-- The end of what is generated. -->"

EVENTS = {
    TileEvent.ARRIVAL: "a gradient of one of its segments arrives; a spare, present or on its way, is dropped",
    TileEvent.FORGET: "one parameter's gradient is discarded, and others stay",
    TileEvent.COMPLETE: "every gradient that the window is expected to bring is there",
    TileEvent.SPECULATE: "a pass begins: own state buffer and gradients into a spare",
    TileEvent.SPECULATED: "the pass ends, and nothing came meanwhile",
    TileEvent.KEEP: "verdict: with the scale that was assumed; the spare becomes its state buffer",
    TileEvent.REDO: "verdict: with another scale; the spare is dropped",
    TileEvent.COMMIT: "verdict: stepped in place, with the true scale",
    TileEvent.COMMIT_DONE: "that pass ends",
    TileEvent.COMMIT_FAILED: "that pass fails: every later call says so until a state is loaded",
    TileEvent.PUBLISHED: "the new parameters are on their way, and the current stream waits for them",
    TileEvent.DISCARD: "the window is discarded, or its step is skipped",
    TileEvent.LOAD: "a state is loaded over whatever it held",
}


def table() -> str:
    """A row for each event and state that it leads to."""
    lines = ["| on | from | to |", "|---|---|---|"]
    for event, what in EVENTS.items():
        moves: dict[TileState, list[str]] = {}
        for (before, on), after in TRANSITIONS.items():
            if on is event:
                moves.setdefault(after, []).append(before.name)
        for after, befores in moves.items():
            where = "any" if len(befores) == len(TileState) else ", ".join(befores)
            lines.append(f"| {what} | {where} | {after.name} |")
    return "\n".join([*lines, ""])


def filled(text: str) -> str:
    """The page with its table as the code has it now."""
    return filled_between(text, f"{BEGIN}\n{table()}\n{END}")


def filled_between(text: str, content: str) -> str:
    """A page with what stands between its two comments, and these, replaced."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert pattern.search(text), "the page has lost the comments that its table stands between"
    return pattern.sub(lambda _: content, text)
