"""Few rows of a table in which every two values of different columns meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(columns: Mapping[str, Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Rows that together contain every pair; found greedily, the same for the same seed."""
    names = list(columns)
    missing = {
        (a, x, b, y)
        for (a, b) in itertools.combinations(range(len(names)), 2)
        for x in range(len(columns[names[a]]))
        for y in range(len(columns[names[b]]))
    }
    chosen, generator = [], random.Random(seed)
    while missing:
        a, x, b, y = min(missing)
        best: tuple[int, tuple[int, ...]] = (-1, ())
        for _ in range(30):
            row = [generator.randrange(len(columns[name])) for name in names]
            row[a], row[b] = x, y
            covers = sum((i, row[i], j, row[j]) in missing for i, j in itertools.combinations(range(len(names)), 2))
            best = max(best, (covers, tuple(row)))
        row = best[1]
        missing -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        chosen.append(tuple(columns[name][index] for name, index in zip(names, row, strict=True)))
    return chosen
