from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support import plan_tiles
from torch import Tensor

from longshore.errors import BrokenStateError
from longshore.kernels import UNSCALED, HostKernels, Scale
from longshore.kernels.reference import rule_step
from longshore.optim.rules.adam import AdamRule
from longshore.tiles.in_place import commit_tile
from longshore.tiles.memory import BufferPool
from longshore.tiles.speculation import Bet
from longshore.tiles.tile import ArrayNames, IllegalTransitionError, SegmentStep, Tile, TileEvent, TileState
from longshore.transfer import Copy

NUMELS = {0: 37, 1: 5, 2: 20}
RULES = {
    0: AdamRule(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3, decoupled=True),
    1: AdamRule(lr=3e-2, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.0, step=7, decoupled=True),
    2: AdamRule(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, decoupled=False),
}
HALVED = Scale(0.5)


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(threads=2)


class Broken(HostKernels):
    """Kernels that write, and then fail."""

    def step_tile(self, *args, **kwargs) -> None:
        super().step_tile(*args, **kwargs)
        raise RuntimeError("the kernel failed")


ARRAYS = ArrayNames(("master", "exp_avg", "exp_avg_sq"))


class Late(Copy):
    """A copy that is on its way until somebody waits for it."""

    def __init__(self, source: Tensor) -> None:
        self.target = torch.full_like(source, float("nan"))
        self._source = source

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.target.copy_(self._source)


def make_tile(spares: BufferPool, dtype: torch.dtype = torch.float32) -> Tile:
    """Three parameters of three groups, in mid-training; the buffer comes from the pool."""
    (layout,) = plan_tiles(NUMELS.items(), 1000)
    tile = Tile(layout, dtype, dtype, ARRAYS)
    tile.buffer = spares.take(tile.buffer_kind)
    tile.buffer.copy_(torch.randn(tile.buffer.shape))
    tile.buffer[2].abs_()
    return tile


def gradients_for(*parameters: int, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    return {parameter: torch.randn(NUMELS[parameter]).to(dtype) for parameter in parameters}


def arrive(tile: Tile, gradients: Mapping[int, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        segment = tile.segments[parameter]
        tile.arrived(segment)
        segment.gradient = gradient


def complete(tile: Tile, gradients: Mapping[int, Tensor]) -> None:
    arrive(tile, gradients)
    tile.move(TileEvent.COMPLETE)


def steps_for(tile: Tile) -> list[SegmentStep]:
    """Every segment that has a gradient, with an output of its own."""
    return [
        SegmentStep(segment, RULES[parameter], torch.empty(NUMELS[parameter], dtype=tile.dtype))
        for parameter, segment in tile.segments.items()
        if segment.arrivals
    ]


def state_of(tile: Tile) -> dict[int, tuple[Tensor, ...]]:
    buffer = tile.buffer
    assert buffer is not None
    return {
        parameter: tuple(buffer[which, segment.layout.in_buffer].clone() for which in range(3))
        for parameter, segment in tile.segments.items()
    }


def expected_of(tile: Tile, gradients: Mapping[int, Tensor], scale: Scale = UNSCALED) -> dict[int, tuple[Tensor, ...]]:
    return {
        parameter: rule_step(state, gradients[parameter], RULES[parameter], scale) if parameter in gradients else state
        for parameter, state in state_of(tile).items()
    }


def same(left: Mapping[int, tuple[Tensor, ...]], right: Mapping[int, tuple[Tensor, ...]]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(a, b) for parameter in left for a, b in zip(left[parameter], right[parameter], strict=True))


def speculate(
    tile: Tile, spares: BufferPool, kernels: HostKernels, scale: Scale = UNSCALED
) -> tuple[Bet, list[SegmentStep]]:
    steps = steps_for(tile)
    speculation = Bet(tile, steps, spares.take(tile.buffer_kind), scale)
    speculation.run(kernels)
    return speculation, steps


# -- in place -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("active", [(0, 1, 2), (1,), (0, 2)])
def test_in_place(dtype: torch.dtype, active: tuple[int, ...], kernels: HostKernels) -> None:
    tile = make_tile(BufferPool(), dtype)
    gradients = gradients_for(*active, dtype=dtype)
    expected = expected_of(tile, gradients, HALVED)
    arrive(tile, gradients)
    steps = steps_for(tile)
    commit_tile(tile, steps, HALVED, kernels)
    assert tile.state is TileState.COMMITTED
    assert same(state_of(tile), expected)
    for segment, _, output in steps:
        assert torch.equal(output, expected[segment.layout.parameter][0].to(dtype))


def test_the_output_may_take_the_gradients_memory(kernels: HostKernels) -> None:
    tile = make_tile(BufferPool(), torch.bfloat16)
    gradients = gradients_for(0, 1, 2, dtype=torch.bfloat16)
    expected = expected_of(tile, gradients)
    arrive(tile, gradients)
    steps = [step._replace(output=step.segment.wait()) for step in steps_for(tile)]
    commit_tile(tile, steps, UNSCALED, kernels)
    assert same(state_of(tile), expected)
    assert all(torch.equal(gradients[p], expected[p][0].to(torch.bfloat16)) for p in gradients)


def test_a_kernel_that_fails_in_place_leaves_the_tile_broken(kernels: HostKernels) -> None:
    tile = make_tile(BufferPool())
    arrive(tile, gradients_for(0))
    with pytest.raises(RuntimeError, match="the kernel failed"):
        commit_tile(tile, steps_for(tile), UNSCALED, Broken(threads=1))
    assert tile.state is TileState.BROKEN
    with pytest.raises(BrokenStateError):
        tile.arrived(tile.segments[0])
    with pytest.raises(BrokenStateError):
        commit_tile(tile, steps_for(tile), UNSCALED, kernels)


def test_an_empty_tile_is_not_stepped(kernels: HostKernels) -> None:
    tile = make_tile(BufferPool())
    before = state_of(tile)
    with pytest.raises(IllegalTransitionError):
        commit_tile(tile, [], UNSCALED, kernels)
    with pytest.raises(IllegalTransitionError):
        Bet(tile, [], BufferPool().take(tile.buffer_kind), UNSCALED)
    assert same(state_of(tile), before)


# -- speculation that is kept -------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("active", [(0, 1, 2), (1,), (0, 2)])
def test_kept_is_what_in_place_would_have_given(
    dtype: torch.dtype, active: tuple[int, ...], kernels: HostKernels
) -> None:
    spares = BufferPool()
    tile, twin = make_tile(spares, dtype), make_tile(spares, dtype)
    assert tile.buffer is not None and twin.buffer is not None
    twin.buffer.copy_(tile.buffer)
    gradients = gradients_for(*active, dtype=dtype)
    arrive(twin, gradients)
    twin_steps = steps_for(twin)
    commit_tile(twin, twin_steps, HALVED, kernels)

    before, old_buffer = state_of(tile), tile.buffer
    complete(tile, gradients)
    # A buffer that another tile used comes back dirty.
    spares.give_back(torch.full_like(old_buffer, float("nan")))
    speculation, steps = speculate(tile, spares, kernels, HALVED)
    assert tile.state is TileState.STEPPING
    assert same(state_of(tile), before)  # buffer A is only read
    assert speculation.end(spares)
    assert tile.state is TileState.STEPPED
    assert same(state_of(tile), before)

    tile.keep_spare(spares)
    assert tile.state is TileState.COMMITTED
    assert tile.buffer is speculation.target is not old_buffer
    assert tile.spare is None
    assert same(state_of(tile), state_of(twin))  # with the idle segments carried over
    for step, twin_step in zip(steps, twin_steps, strict=True):
        assert torch.equal(step.output, twin_step.output)
    assert spares.take(tile.buffer_kind) is old_buffer


def test_a_pass_begins_when_its_gradients_are_here(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    gradients = gradients_for(0, 2)
    expected = expected_of(tile, gradients)
    complete(tile, gradients)
    for segment in (tile.segments[0], tile.segments[2]):
        segment.handle = Late(gradients[segment.layout.parameter])
        segment.gradient = segment.handle.target
    speculation, _ = speculate(tile, spares, kernels)
    assert speculation.end(spares)
    tile.keep_spare(spares)
    assert same(state_of(tile), expected)


def test_buffers_go_round(kernels: HostKernels) -> None:
    """Window after window, a tile and one spare: two buffers, and the bits of stepping in place."""
    spares = BufferPool()
    tile, twin = make_tile(spares), make_tile(BufferPool())
    assert tile.buffer is not None and twin.buffer is not None
    twin.buffer.copy_(tile.buffer)
    buffer_bytes = spares.allocated_bytes
    for window in range(5):
        gradients = gradients_for(*[(0, 1, 2), (1,), (2,), (0, 2), (0,)][window])
        complete(tile, gradients)
        speculation, _ = speculate(tile, spares, kernels)
        assert speculation.end(spares)
        tile.keep_spare(spares)
        arrive(twin, gradients)
        commit_tile(twin, steps_for(twin), UNSCALED, kernels)
        assert same(state_of(tile), state_of(twin))
        for each in (tile, twin):
            each.move(TileEvent.PUBLISHED)
            each.end_window(stepped=True)
    assert spares.allocated_bytes == 2 * buffer_bytes


# -- speculation that is not --------------------------------------------------


def test_redo_restores_bytes_and_steps_with_the_true_scale(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    gradients = gradients_for(0, 2)
    expected, before = expected_of(tile, gradients, HALVED), state_of(tile)
    complete(tile, gradients)
    speculation, _ = speculate(tile, spares, kernels)
    assert speculation.end(spares)
    tile.redo(spares)
    assert tile.state is TileState.READY
    assert same(state_of(tile), before)
    assert spares.take(tile.buffer_kind) is speculation.target
    commit_tile(tile, steps_for(tile), HALVED, kernels)
    assert same(state_of(tile), expected)


def test_an_arrival_while_stepping_changes_the_version(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    early, late = gradients_for(0, 1), gradients_for(2)
    before = state_of(tile)
    complete(tile, early)
    speculation, _ = speculate(tile, spares, kernels)
    arrive(tile, late)
    assert tile.state is TileState.FILLING
    assert not speculation.end(spares)
    assert tile.state is TileState.FILLING
    assert tile.spare is None
    assert spares.take(tile.buffer_kind) is speculation.target
    assert same(state_of(tile), before)
    expected = expected_of(tile, {**early, **late})
    commit_tile(tile, steps_for(tile), UNSCALED, kernels)
    assert same(state_of(tile), expected)


def test_a_gradient_that_is_taken_out_while_stepping_changes_the_version(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    gradients = gradients_for(0, 1)
    complete(tile, gradients)
    speculation, _ = speculate(tile, spares, kernels)
    assert tile.forget(tile.segments[1]) == 1
    assert tile.state is TileState.FILLING
    assert not speculation.end(spares)
    assert tile.state is TileState.FILLING and tile.spare is None
    expected = expected_of(tile, {0: gradients[0]})
    commit_tile(tile, steps_for(tile), UNSCALED, kernels)
    assert same(state_of(tile), expected)


def test_an_old_pass_that_ends_during_a_new_one_harms_nothing(kernels: HostKernels) -> None:
    """The tile was completed and speculated on again before the first pass came home."""
    spares = BufferPool()
    tile = make_tile(spares)
    early, late = gradients_for(0, 1), gradients_for(2)
    complete(tile, early)
    old_steps = steps_for(tile)
    old = Bet(tile, old_steps, spares.take(tile.buffer_kind), UNSCALED)
    complete(tile, late)
    expected = expected_of(tile, {**early, **late})
    new = Bet(tile, steps_for(tile), spares.take(tile.buffer_kind), UNSCALED)
    assert new.target is not old.target
    new.run(kernels)
    old.run(kernels)
    assert not old.end(spares)
    assert tile.state is TileState.STEPPING
    assert new.end(spares)
    tile.keep_spare(spares)
    assert same(state_of(tile), expected)
    assert spares.allocated_bytes == 3 * 12 * old.source.shape[1]


@pytest.mark.parametrize("again", [False, True], ids=["idle", "begun again"])
def test_a_window_discarded_while_stepping(again: bool, kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    before = state_of(tile)
    complete(tile, gradients_for(0, 1))
    speculation, _ = speculate(tile, spares, kernels)
    tile.move(TileEvent.DISCARD)
    tile.end_window(stepped=True)
    if again:
        # As many arrivals as before, so that only the end of the window tells the versions apart.
        complete(tile, gradients_for(1, 2))
        Bet(tile, steps_for(tile), spares.take(tile.buffer_kind), UNSCALED)
        assert tile.window == 1 and sum(segment.arrivals for segment in tile.segments.values()) == 2
    assert not speculation.end(spares)
    assert tile.state is (TileState.STEPPING if again else TileState.EMPTY)
    assert tile.spare is None
    assert same(state_of(tile), before)


def test_an_arrival_after_stepping_drops_the_spare_buffer(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    complete(tile, gradients_for(0))
    speculation, _ = speculate(tile, spares, kernels)
    assert speculation.end(spares)
    arrive(tile, gradients_for(1))
    tile.drop_spare(spares)
    assert tile.state is TileState.FILLING and tile.spare is None
    assert spares.take(tile.buffer_kind) is speculation.target
    with pytest.raises(IllegalTransitionError):
        tile.keep_spare(spares)


def test_a_kernel_that_fails_out_of_place_harms_nothing(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    gradients = gradients_for(0, 1)
    before, expected = state_of(tile), expected_of(tile, gradients)
    complete(tile, gradients)
    speculation = Bet(tile, steps_for(tile), spares.take(tile.buffer_kind), UNSCALED)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        speculation.run(Broken(threads=1))
    if speculation.end(spares):
        tile.redo(spares)
    assert tile.state is TileState.READY and tile.spare is None
    assert same(state_of(tile), before)
    again, _ = speculate(tile, spares, kernels)
    assert again.target is speculation.target  # it came back
    assert again.end(spares)
    tile.keep_spare(spares)
    assert same(state_of(tile), expected)


def test_a_failed_pass_with_an_old_version(kernels: HostKernels) -> None:
    spares = BufferPool()
    tile = make_tile(spares)
    complete(tile, gradients_for(0))
    speculation = Bet(tile, steps_for(tile), spares.take(tile.buffer_kind), UNSCALED)
    arrive(tile, gradients_for(1))
    if speculation.end(spares):
        tile.redo(spares)
    assert tile.state is TileState.FILLING and tile.spare is None
    assert spares.take(tile.buffer_kind) is speculation.target


def test_a_speculation_owns_what_it_reads(kernels: HostKernels) -> None:
    """The window is discarded, and its gradients freed, while the pass runs."""
    spares = BufferPool()
    tile = make_tile(spares)
    gradients = gradients_for(0)
    expected = expected_of(tile, gradients)
    complete(tile, gradients)
    speculation = Bet(tile, steps_for(tile), spares.take(tile.buffer_kind), UNSCALED)
    layout = tile.segments[0].layout
    tile.move(TileEvent.DISCARD)
    tile.end_window(stepped=True)
    del gradients, tile
    [torch.full((NUMELS[0],), float("nan")) for _ in range(100)]
    speculation.run(kernels)
    part = slice(layout.buffer_offset, layout.buffer_offset + layout.numel)
    assert torch.equal(speculation.target[0, part], expected[0][0])
