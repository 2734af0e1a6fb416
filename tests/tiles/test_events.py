"""The schedule as data, against what the store does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import longshore
from longshore.kernels import TileSegment
from longshore.layout.memory import PIPELINE_DEPTH
from longshore.tiles import Recorder
from longshore.tiles.events import (
    ARRIVE,
    COPY_TO_HOST,
    DROPPED,
    KEPT,
    NORM,
    PUBLISH,
    SCHEDULE,
    STEP_AHEAD,
    STEP_IN_PLACE,
    Move,
    Track,
    Which,
    commit_moves,
)
from longshore.transfer import Copy


class Witness(Recorder):
    """Looks, whenever something is over or asked for, whether what the table says has ended before it."""

    def __init__(self) -> None:
        self.over: list[tuple[str, int | None]] = []
        self.copies: dict[tuple[str, int], list[Copy]] = {}
        self.wrong: list[tuple[str, int | None, str]] = []
        self.waited: set[tuple[str, str]] = set()

    def _see(self, name: str, tile: int | None) -> None:
        for before, which in SCHEDULE[name].after if name in SCHEDULE else ():
            tiles = [tile] if which is Which.SAME else {each for kind, each in [*self.copies, *self.over] if kind}
            for each in tiles:
                handles = self.copies.get((before, each), []) if each is not None else []
                if handles:
                    self.waited.add((name, before))
                if not all(handle.done() for handle in handles):
                    self.wrong.append((name, tile, before))
        self.over.append((name, tile))

    def begin(self, name: str, tile: int | None) -> int:
        return 0

    def mark(self, name: str, tile: int | None) -> None:
        self._see(name, tile)

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        self._see(name, tile)

    def passed(self, name: str, tile: int, buffer: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        self._see(name, tile)

    def copying(self, name: str, tile: int, handle: Copy, begin_ns: int) -> None:
        self.copies.setdefault((name, tile), []).append(handle)
        self._see(f"asked: {name}", tile)


def trained(seed: int, share: int | str, clip: bool = True) -> Witness:
    """Two windows on a device whose tracks are late, the second of which is witnessed."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    transfer = longshore.SimulatedTransfer(seed=seed, max_delay_s=0.004)
    offload = longshore.Offload(threads=1, tile_numel=400, transfer=transfer, speculation_memory=share)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3, release_gradients=True, offload=offload)
    witness = Witness()
    for window in range(3):
        if window == 2:
            optimizer._core.members.store.set_recorders([witness])
        model(torch.randn(4, 24)).square().sum().backward()
        if clip:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    optimizer.close()
    return witness


@pytest.mark.parametrize("share", [*(pytest.param(share, marks=pytest.mark.slow) for share in (0, "100%")), "50%"])
def test_the_table_is_what_the_store_does(share: int | str) -> None:
    seen: set[tuple[str, str]] = set()
    for seed in range(3):
        witness = trained(seed, share)
        assert witness.wrong == []
        seen |= witness.waited
        order = [name for name, _ in witness.over]
        tiles = {tile for name, tile in witness.over if name == ARRIVE}
        assert len(tiles) > PIPELINE_DEPTH
        norm = order.index(NORM)
        # Before the verdict nothing is stepped in place or published, and after it nothing is stepped ahead.
        asked = [place for place, name in enumerate(order) if name in (STEP_IN_PLACE, f"asked: {PUBLISH}")]
        ahead = [place for place, name in enumerate(order) if name == STEP_AHEAD]
        assert min(asked) > norm and (not ahead or max(ahead) < min(asked))
        passes = [tile for name, tile in witness.over if name in (STEP_AHEAD, STEP_IN_PLACE)]
        assert sorted(passes) == sorted(tiles)  # each tile once
        kept = [tile for name, tile in witness.over if name == KEPT]
        assert len(kept) == len(ahead) and (len(kept) > 0) == (share != 0)
        assert (len(kept) < len(tiles)) == (share != "100%")
        published = list(dict.fromkeys(tile for name, tile in witness.over if name == f"asked: {PUBLISH}"))
        # What was stepped ahead goes first, and the others in their order.
        assert published == [*sorted(kept), *sorted(tiles - set(kept))]
    expected = {(NORM, COPY_TO_HOST), (STEP_IN_PLACE, COPY_TO_HOST), (STEP_AHEAD, COPY_TO_HOST)}
    absent = {STEP_AHEAD: share == 0, STEP_IN_PLACE: share == "100%"}
    assert seen >= {(name, before) for name, before in expected if not absent.get(name)}
    assert DROPPED not in {name for name, _ in witness.over}


@pytest.mark.parametrize(("share", "name"), [(0, STEP_IN_PLACE), ("100%", STEP_AHEAD)])
def test_without_a_norm_each_pass_waits_for_its_own_copies(share: int | str, name: str) -> None:
    for seed in range(3):
        witness = trained(seed, share, clip=False)
        assert witness.wrong == [] and (name, COPY_TO_HOST) in witness.waited
        assert NORM not in {name for name, _ in witness.over}


def test_the_table_is_closed() -> None:
    for row in SCHEDULE.values():
        assert isinstance(row.track, Track)
        assert all(before in SCHEDULE for before, _ in row.after)


@given(count=st.integers(0, 30), depth=st.integers(1, 6))
def test_the_moves_of_a_commit(count: int, depth: int) -> None:
    moves = list(commit_moves(count, depth))
    for move in Move:  # each tile once, in order
        assert [place for kind, place in moves if kind is move] == list(range(count))
    under_way = 0
    for (kind, place), before in zip(moves, [None, *moves], strict=False):
        under_way += 1 if kind is Move.FILL else -1
        assert 0 <= under_way <= depth
        assert kind is Move.FILL or (Move.FILL, place) in moves[: moves.index((kind, place))]
        # No tile waits while there is room.
        assert kind is Move.FILL or under_way + 1 == depth or place >= count - depth, before
    assert all(left != right for left, right in pairwise(moves))
