"""The states of a tile, what each means, and the only moves between them."""

from __future__ import annotations

from enum import Enum, auto

from longshore.errors import BrokenStateError, IllegalTransitionError


class TileState(Enum):
    """Where a tile is in its window."""

    EMPTY = auto()
    """No gradient of this window has arrived."""
    FILLING = auto()
    """Some have arrived; more may come, or are still on their way or being added."""
    READY = auto()
    """Every gradient that the window is expected to bring is here, or queued ahead of any pass."""
    STEPPING = auto()
    """A speculative pass writes a spare page; the tile's own page is only read."""
    STEPPED = auto()
    """The spare page holds the step; the tile's own page is untouched."""
    COMMITTING = auto()
    """Stepped in place with the true scale; the page is neither old nor new."""
    COMMITTED = auto()
    """The page is the new one; the parameters on the device are still old."""
    BROKEN = auto()
    """A pass failed while it wrote in place. Only loading a state leaves this."""


class TileEvent(Enum):
    """What can happen to a tile."""

    ARRIVAL = auto()
    FORGET = auto()
    """One parameter's gradient is discarded, and others stay."""
    COMPLETE = auto()
    SPECULATE = auto()
    SPECULATED = auto()
    KEEP = auto()
    """The verdict is commit, with the scale that the speculation assumed."""
    REDO = auto()
    """The verdict is commit, with another scale."""
    COMMIT = auto()
    """The verdict is commit, and nothing was speculated."""
    COMMIT_DONE = auto()
    COMMIT_FAILED = auto()
    PUBLISHED = auto()
    DISCARD = auto()
    """The window is discarded, or its step is skipped."""
    LOAD = auto()
    """A state is loaded over whatever the tile held."""


TRANSITIONS: dict[tuple[TileState, TileEvent], TileState] = {
    (TileState.EMPTY, TileEvent.ARRIVAL): TileState.FILLING,
    (TileState.FILLING, TileEvent.ARRIVAL): TileState.FILLING,
    (TileState.READY, TileEvent.ARRIVAL): TileState.FILLING,
    (TileState.STEPPING, TileEvent.ARRIVAL): TileState.FILLING,
    (TileState.STEPPED, TileEvent.ARRIVAL): TileState.FILLING,
    (TileState.FILLING, TileEvent.FORGET): TileState.FILLING,
    (TileState.READY, TileEvent.FORGET): TileState.FILLING,
    (TileState.STEPPING, TileEvent.FORGET): TileState.FILLING,
    (TileState.STEPPED, TileEvent.FORGET): TileState.FILLING,
    (TileState.FILLING, TileEvent.COMPLETE): TileState.READY,
    (TileState.READY, TileEvent.SPECULATE): TileState.STEPPING,
    (TileState.STEPPING, TileEvent.SPECULATED): TileState.STEPPED,
    (TileState.STEPPED, TileEvent.KEEP): TileState.COMMITTED,
    (TileState.STEPPED, TileEvent.REDO): TileState.READY,
    (TileState.FILLING, TileEvent.COMMIT): TileState.COMMITTING,
    (TileState.READY, TileEvent.COMMIT): TileState.COMMITTING,
    (TileState.COMMITTING, TileEvent.COMMIT_DONE): TileState.COMMITTED,
    (TileState.COMMITTING, TileEvent.COMMIT_FAILED): TileState.BROKEN,
    (TileState.COMMITTED, TileEvent.PUBLISHED): TileState.EMPTY,
    (TileState.EMPTY, TileEvent.DISCARD): TileState.EMPTY,
    (TileState.FILLING, TileEvent.DISCARD): TileState.EMPTY,
    (TileState.READY, TileEvent.DISCARD): TileState.EMPTY,
    (TileState.STEPPING, TileEvent.DISCARD): TileState.EMPTY,
    (TileState.STEPPED, TileEvent.DISCARD): TileState.EMPTY,
    **{(state, TileEvent.LOAD): TileState.EMPTY for state in TileState},
}


def next_state(state: TileState, event: TileEvent) -> TileState:
    """The state after ``event``.

    Raises:
        BrokenStateError: the tile is broken, and the event does not mend it.
        IllegalTransitionError: any other move that is not in the table.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        pass
    if state is TileState.BROKEN:
        raise BrokenStateError(
            "an earlier step failed half way, so some weights were stepped and others were not; "
            "load a saved state with load_state_dict (and the model's weights) before going on"
        )
    raise IllegalTransitionError(f"a tile that is {state.name} cannot take {event.name}")
