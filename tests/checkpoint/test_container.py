"""Optimizers in a container like torchtitan's, with checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

from checkpoint import container_cases as cases


@pytest.mark.medium
@pytest.mark.parametrize(
    "layout, released",
    [
        ("FSDP2", False),
        pytest.param("FSDP2", True, marks=pytest.mark.slow),
        pytest.param("interleaved 1F1B", False, marks=pytest.mark.slow),
        pytest.param("TP with sequence parallel", False, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(layout: str, released: bool, tmp_path: Path, two_ranks: Ranks) -> None:
    two_ranks(cases.saved_and_loaded, layout, tmp_path, released)


@pytest.mark.medium
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("1F1B", marks=pytest.mark.slow),
        pytest.param("interleaved 1F1B", marks=pytest.mark.needs_torch("interleaved 1F1B over gloo")),
    ],
)
def test_stages_of_a_pipeline(layout: str, tmp_path: Path, two_ranks: Ranks) -> None:
    two_ranks(cases.saved_and_loaded_by_longshore, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP with sequence parallel + FSDP2", "1F1B + FSDP2"])
def test_four_ranks(layout: str, tmp_path: Path, four_ranks: Ranks) -> None:
    four_ranks(cases.saved_and_loaded, layout, tmp_path, False)
