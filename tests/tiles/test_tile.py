from __future__ import annotations

import itertools
import re

import torch

from longshore.errors import BrokenStateError, LongshoreError
from longshore.layout.tiles import TileLayout
from longshore.tiles.tile import ArrayNames, IllegalTransitionError, Tile, TileEvent, TileState

# Written out once more, row by row, and not read from the table that is tested.
TABLE = """
EMPTY       ARRIVAL        FILLING
FILLING     ARRIVAL        FILLING
FILLING     COMPLETE       READY
READY       ARRIVAL        FILLING
STEPPING    ARRIVAL        FILLING
STEPPED     ARRIVAL        FILLING
READY       SPECULATE      STEPPING
STEPPING    SPECULATED     STEPPED
STEPPED     KEEP           COMMITTED
STEPPED     REDO           READY
FILLING     COMMIT         COMMITTING
READY       COMMIT         COMMITTING
COMMITTING  COMMIT_DONE    COMMITTED
COMMITTING  COMMIT_FAILED  BROKEN
COMMITTED   PUBLISHED      EMPTY
FILLING     DISCARD        EMPTY
READY       DISCARD        EMPTY
STEPPING    DISCARD        EMPTY
STEPPED     DISCARD        EMPTY
"""
# Not in the buffer's table: discarding nothing is allowed, or one gradient of several, which makes what was stepped
# with it void; and loading a state mends everything ("every later call says so until state is loaded").
BESIDES = """
FILLING     FORGET         FILLING
READY       FORGET         FILLING
STEPPING    FORGET         FILLING
STEPPED     FORGET         FILLING
EMPTY       DISCARD        EMPTY
EMPTY       LOAD           EMPTY
FILLING     LOAD           EMPTY
READY       LOAD           EMPTY
STEPPING    LOAD           EMPTY
STEPPED     LOAD           EMPTY
COMMITTING  LOAD           EMPTY
COMMITTED   LOAD           EMPTY
BROKEN      LOAD           EMPTY
"""
ALLOWED = {(state, event): to for state, event, to in (line.split() for line in (TABLE + BESIDES).splitlines() if line)}


def next_state(state: TileState, event: TileEvent) -> TileState:
    tile = Tile(TileLayout(0, (), 0), torch.float32, torch.float32, ArrayNames(("master",)))
    tile.state = state
    try:
        tile.move(event)
    except LongshoreError:
        assert tile.state is state
        raise
    return tile.state


def test_the_tables_names_are_the_codes() -> None:
    assert len(ALLOWED) == 32
    assert {state for state, _ in ALLOWED} | set(ALLOWED.values()) == {state.name for state in TileState}
    assert {event for _, event in ALLOWED} == {event.name for event in TileEvent}


def found(state: TileState, event: TileEvent) -> str:
    """The state that follows, or the error in so many words."""
    try:
        return next_state(state, event).name
    except LongshoreError as error:
        return f"{type(error).__name__}: {error}"


def test_every_pair() -> None:
    pairs = {(state.name, event.name): found(state, event) for state, event in itertools.product(TileState, TileEvent)}
    assert {pair: to for pair, to in pairs.items() if ": " not in to} == ALLOWED
    for (state, event), refused in pairs.items():
        broken = "BrokenStateError: .*load_state_dict"
        expected = broken if state == "BROKEN" else f"IllegalTransitionError: .*{state} cannot take {event}"
        assert (state, event) in ALLOWED or re.match(expected, refused), refused


def test_users_can_catch_both() -> None:
    assert issubclass(BrokenStateError, LongshoreError) and issubclass(IllegalTransitionError, LongshoreError)
