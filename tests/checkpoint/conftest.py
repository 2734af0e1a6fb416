"""Running a case on a number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks

RunOn = Callable[..., list[Any]]


@pytest.fixture
def run_on(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks) -> RunOn:
    """``run_on(ranks, case, ...)``: what each rank returns."""
    crews = {2: two_ranks, 3: three_ranks, 4: four_ranks}

    def run(count: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [case(*arguments)] if count == 1 else crews[count](case, *arguments)

    return run
