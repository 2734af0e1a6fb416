from __future__ import annotations

import pytest
import torch
from support import plan_tiles

from longshore.kernels import UNSCALED, HostKernels, Scale
from longshore.layout.tiles import Spec
from longshore.tiles import TierSettings, Tiles
from longshore.tiles.speculation import Due, EarlyNorms
from longshore.tiles.tile import ArrayNames, Tile, TileEvent
from longshore.transfer import Copy, CopyStreams

HALVED = Scale(0.5)
NUMELS = {0: 30, 1: 70, 2: 20}
"""In tiles of 40: parameter 1 lies in all three, in the first beside 0 and in the last beside 2."""


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(threads=1)


class Window:
    """Tiles of which all parameters but the idle one got a gradient in the last window; they get another in this."""

    def __init__(self, kernels: HostKernels, idle: int | None = None) -> None:
        layouts, arrays = plan_tiles(NUMELS.items(), 40), ArrayNames(("master",))
        self.tiles = [Tile(layout, torch.float32, torch.float32, arrays) for layout in layouts]
        self.parts = {
            index: [(tile, tile.segments[index]) for tile in self.tiles if index in tile.segments] for index in NUMELS
        }
        assert [len(parts) for parts in self.parts.values()] == [1, 3, 1]
        self.active = [index for index in reversed(NUMELS) if index != idle]
        self.norms = EarlyNorms(kernels, self.parts.__getitem__)
        self.arrive()
        for tile in self.tiles:
            for event in (TileEvent.COMMIT, TileEvent.COMMIT_DONE, TileEvent.PUBLISHED):
                tile.move(event)
            tile.end_window(stepped=True)

    def arrive(self) -> list[list[int]]:
        """One parameter after the other, the last first; for each, what is measured then."""
        found = []
        for index in self.active:
            found.append([])
            for tile, segment in self.parts[index]:
                tile.arrived(segment)
                segment.gradient = torch.randn(segment.layout.numel)
                if tile.complete:
                    due = self.norms.due(tile)
                    self.norms.measure(due, UNSCALED)
                    found[-1] += [one.parameter for one in due]
        return found


def test_a_parameter_is_measured_once_with_the_last_of_its_tiles(kernels: HostKernels) -> None:
    assert Window(kernels).arrive() == [[], [2], [0, 1]]


def test_what_is_idle_is_not_measured(kernels: HostKernels) -> None:
    window = Window(kernels, idle=2)
    assert window.arrive() == [[], [0, 1]]


def test_a_norm_holds_at_its_scale_until_something_arrives(kernels: HostKernels) -> None:
    window = Window(kernels)
    window.arrive()
    assert window.norms.known(UNSCALED).keys() == NUMELS.keys()
    assert window.norms.known(HALVED) == {}
    tile = window.tiles[0]
    tile.arrived(tile.segments[0])
    assert window.norms.known(UNSCALED).keys() == {index for index in NUMELS if index not in tile.segments}


class LateCopy(Copy):
    """A copy whose bytes are there only when somebody has waited for it."""

    def __init__(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self.target = target
        self._values = values

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.target.copy_(self._values)


def test_measuring_waits_for_the_copies_of_gradients(kernels: HostKernels) -> None:
    norms, values, copied = EarlyNorms(kernels, lambda index: []), torch.arange(4.0), torch.zeros(4)
    norms.measure([Due(0, [], [copied], [LateCopy(copied, values)])], UNSCALED)
    assert sum(norms.known(UNSCALED)[0]) == 14.0


@pytest.mark.parametrize("known", [set(), {0}, {2, 4}, {0, 1, 2, 3, 4}])
def test_squares_are_added_in_the_order_of_the_parameters(
    kernels: HostKernels, known: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was measured before. One 2**-54 after the other is lost beside 1; all of them before it are not."""
    values = {index: torch.tensor([2.0**-27 if index else 1.0]) for index in range(5)}
    store = Tiles([TierSettings(CopyStreams(), kernels, 40, hold_gradients=True)])
    store.add(Spec(index, 1, torch.float32) for index in values)
    blocks = {index: [float(values[index].double() ** 2)] for index in known}
    monkeypatch.setattr(store.tier.speculator, "known_squares", lambda scale: blocks)
    assert store.sum_of_squares(dict(values), UNSCALED) == 1.0
    assert store.sum_of_squares(dict(reversed(values.items())), UNSCALED) > 1.0
    store.close()
