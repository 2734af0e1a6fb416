"""After ``engine.destroy()`` whatever needs the other ranks says so at once."""

from __future__ import annotations

import pytest
from ranks import Ranks

from engine import destroyed_cases

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.mark.medium
@STAGES
def test_every_call_names_destroy(stage: int, two_ranks: Ranks) -> None:
    for said in two_ranks(destroyed_cases.after_destroy, stage):
        for name, message in said.items():
            assert message.startswith("LongshoreError: engine.destroy() was called"), (name, message)
            assert "initialize() again" in message, name


@pytest.mark.medium
@STAGES
def test_its_model_can_be_given_to_another_engine(stage: int, two_ranks: Ranks) -> None:
    two_ranks(destroyed_cases.anew, stage)
