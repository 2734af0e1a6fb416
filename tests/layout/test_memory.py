"""What is counted without a store is what a store allocates, to the byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.kernels import UNSCALED, HostKernels
from longshore.layout.formats import Coding, StateFormat
from longshore.layout.memory import HomeLayout, Spares
from longshore.layout.tiles import DimRange, Home, MatrixLayout, Spec, runs_by_home
from longshore.optim.rules.adam import AdamRule
from longshore.tiles import ParameterStep, RangeStates, TierSettings, Tiles
from longshore.transfer import CopyStreams, SimulatedTransfer

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
FORMATS = st.sampled_from(list(StateFormat))
PARAMETERS = st.lists(st.tuples(st.integers(1, 9), DTYPES, FORMATS), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    PARAMETERS, st.integers(1, 300), st.booleans(), st.booleans(), st.integers(1, 3), st.sampled_from([None, "float32"])
)
def test_a_store_allocates_what_is_counted(
    parameters: Sequence[tuple[int, torch.dtype, StateFormat]],
    tile_numel: int,
    staged: bool,
    hold: bool,
    arrivals: int,
    gradient_dtype: str | None,
) -> None:
    specs = [
        Spec(index, 64 * blocks, dtype, Coding(format, index))
        for index, (blocks, dtype, format) in enumerate(parameters)
    ]
    arrives_as = None if gradient_dtype is None else torch.float32
    streams = SimulatedTransfer(0) if staged else CopyStreams()
    hold = hold or arrivals > 1 or staged  # without, gradients come in the step, and only one
    store = Tiles([TierSettings(streams, HostKernels(threads=1), tile_numel, hold)], arrives_as)
    states = RangeStates(store)
    states.set_states(AdamRule.states)
    store.add(specs)
    values = {spec.key: torch.zeros(spec.numel, dtype=spec.dtype) for spec in specs}
    for key, each in values.items():
        states.adopt(key, each, keep_matching=False)
    for _ in range(arrivals):
        for spec in specs:
            store.arrive(spec.key, torch.ones(spec.numel, dtype=arrives_as or spec.dtype))
    store.settle()
    runs = runs_by_home(specs, 1.0, {Home.HOST: tile_numel})
    assert not any(run.of_matrix for run in runs)
    home = HomeLayout(Home.HOST, tuple(runs), 3, 2, arrives_as, staged, staged, own_masters=False)
    assert home.tiles == len(store.tiles)
    assert store.host_bytes() == home.memory(arrivals)
    rule = AdamRule(0.1, 0.9, 0.99, 1e-8, 0.0, decoupled=True, step=1)
    store.commit({key: ParameterStep(rule, each, None) for key, each in values.items()}, UNSCALED)
    store.close()


BUDGETS = [(0, 0), (-5, 0), (16 * 14 - 1, 0), (16 * 14, 1), (16 * 14 * 3, 3), (10**9, 4)]


@pytest.mark.parametrize(("budget", "tiles"), BUDGETS)
def test_the_last_tiles_have_spares(budget: int, tiles: int) -> None:
    (run,) = runs_by_home([Spec(0, 64, torch.bfloat16)], 1.0, {Home.HOST: 16})
    home = HomeLayout(Home.HOST, (run,), 3, 2, None, staged=True, publishes=True, own_masters=False)
    asked: list[tuple[int, int]] = []

    def budget_of(most: int, taken: int) -> int:
        asked.append((most, taken))
        return budget - taken

    assert home.spares(budget_of) == Spares(0, tiles, tiles * (16 * 12 + 64))
    assert asked == [(0, 0), (4 * 16 * (12 + 2), 0)]


def test_matrices_have_the_first_of_the_memory() -> None:
    matrix = MatrixLayout(8, 4, (DimRange(0, 0, 8),)).whole(0)
    runs = runs_by_home([Spec(0, 32, torch.bfloat16, matrix=matrix), Spec(1, 32, torch.bfloat16)], 1.0, {Home.HOST: 16})
    home = HomeLayout(Home.HOST, tuple(runs), 3, 2, None, staged=True, publishes=True, own_masters=False)
    of_matrix, of_other = 16 * 8 + 64, 16 * 12 + 64
    for memory, expected in (
        (of_matrix, Spares(1, 0, of_matrix)),
        (2 * of_matrix + of_other, Spares(2, 1, 2 * of_matrix + of_other)),
        (1 << 20, Spares(2, 2, 2 * of_matrix + 2 * of_other)),
    ):
        assert home.spares(lambda most, taken, memory=memory: memory - taken) == expected
