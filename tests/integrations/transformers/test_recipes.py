"""Recipes: the one-line optimizer inside transformers.Trainer, and a real model's weights under both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from integrations.transformers import cases


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.25},
        {"bf16": True, "gradient_checkpointing": True},
        {"fp16": True, "max_grad_norm": 0.25},
    ],
    ids="-".join,
)
def test_one_line(options: dict[str, Any], tmp_path: Path) -> None:
    """Accumulation, clipping, mixed precision, evaluation between steps, resume: weights and logs are torch's."""
    cases.one_line(str(tmp_path), **options)


def test_one_line_with_an_adapter(tmp_path: Path) -> None:
    cases.one_line(str(tmp_path), cases.make_adapted)


@pytest.mark.slow
def test_one_line_with_ddp(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.one_line, str(tmp_path), max_grad_norm=0.25)


@pytest.mark.slow
def test_mini_lm(tmp_path: Path) -> None:
    cases.mini_lm(str(tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.full), 3])
def test_mini_lm_on_two_ranks(number: int, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.mini_lm, str(tmp_path), number)
