"""deepspeedai/DeepSpeed issue 7807: at stages 1 and 2, matrices that lie across the boundary of two ranks' partitions
were made orthogonal in parts.

Here the buckets and ranges of this test cut matrices, and the weights are those of whole ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.muon_cases import started
from ranks import Ranks

from regressions import muon


def cut(stage: int) -> list[str]:
    """The names of the matrices of which both ranks have parts."""
    engine: Any = started(stage, torch.float32)
    shapes = {name: each.shape for name, each in engine.module.named_parameters()}
    found = [each.name for each in engine.explain(False).parameters if len(each.owners) > 1]
    engine.destroy()
    return [name for name in found if len(shapes[name]) > 1]


@pytest.mark.medium
@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize("stage", [1, 2])
def test_matrices_across_boundaries(stage: int, two_ranks: Ranks) -> None:
    assert len(two_ranks(cut, stage)[0]) > 1
    assert two_ranks(muon.train, stage) == [[], []]
