"""Stage 3: what trains is read when it is needed, and not when modules ran first."""

from __future__ import annotations

import pytest
from ranks import Ranks

from engine import thawed_cases as cases

pytestmark = pytest.mark.needs_torch("stage 3")


@pytest.mark.quick(0)
@pytest.mark.parametrize("ran", ["forward", "backward", "no_grad"])
def test_thawed_before_initialize(ran: str, two_ranks: Ranks) -> None:
    two_ranks(cases.thawed_before_initialize, ran)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("trains", [True, False], ids=["thawed", "frozen"])
@pytest.mark.parametrize("ran", [True, False], ids=["ran", "did not run"])
@pytest.mark.parametrize("handles", ["shards", "former"])
def test_changed_between_engines(handles: str, ran: bool, trains: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.changed_between_engines, handles, ran, trains)


@pytest.mark.parametrize("raw", [True, False], ids=["loss.backward", "engine.backward"])
def test_thawed_within_an_engine(raw: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.thawed_within_an_engine, raw)


def test_a_gathered_model_is_refused(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.initialized_while_gathered):
        assert said.startswith("ValueError: parameter embedding.weight is gathered, as a forward without a"), said
        assert "call reshard() of the model" in said


def test_a_write_to_a_former_parameter_under_a_second_engine(two_ranks: Ranks) -> None:
    for (said,) in two_ranks(cases.written_under_a_second_engine):
        assert said.startswith("ParameterError: parameter extra.weight was written through the object that it was"), (
            said
        )
