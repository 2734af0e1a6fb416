"""Running a case on a number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks
from torch_needs import skip_stage_3

RunOn = Callable[..., list[Any]]


@pytest.fixture
def run_on(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks) -> RunOn:
    """``run_on(ranks, case, ...)``: what each rank returns."""
    crews = {2: two_ranks, 3: three_ranks, 4: four_ranks}

    def run(count: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        if count == 1:
            return [case(*arguments)]
        skip_stage_3(*(each.stage for each in arguments if hasattr(each, "stage")))
        return crews[count](case, *arguments)

    return run
