"""The schedule of several ranks as data, against what a rank does."""

from __future__ import annotations

import pytest
from ranks import Ranks

from longshore.plan.simulation import GATHER, REDUCE, SHARDED_SCHEDULE
from longshore.tiles.events import ARRIVE, COPY_TO_HOST, STEP_IN_PLACE, Which
from store import schedule_cases


@pytest.mark.quick(0)
@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_table_is_what_a_rank_does(stage: int, accumulation: int, two_ranks: Ranks) -> None:
    assert SHARDED_SCHEDULE[REDUCE].after == ((ARRIVE, Which.SAME),)
    assert SHARDED_SCHEDULE[COPY_TO_HOST].after == ((REDUCE, Which.SAME),)
    assert (STEP_IN_PLACE, Which.ALL) in SHARDED_SCHEDULE[GATHER].after
    for log, members in two_ranks(schedule_cases.logged, stage, accumulation):
        assert len(members) == 3  # two layers each
        # Stage 2 reduces at every backward, stage 1 with the last one alone.
        rounds = accumulation if stage == 2 else 1
        assert [bucket for name, bucket in log if name == REDUCE] == [*members] * rounds
        for bucket, parameters in members.items():
            times = [place for place, entry in enumerate(log) if entry == (REDUCE, bucket)]
            for number, time in enumerate(times):
                came = [log[:time].count((ARRIVE, parameter)) for parameter in parameters]
                assert min(came) >= (number + 1 if stage == 2 else accumulation)
            copies = [place for place, entry in enumerate(log) if entry == (COPY_TO_HOST, bucket)]
            assert copies and min(copies) > times[0]
        stepped = log.index((STEP_IN_PLACE, None))
        gathers = [place for place, (name, _) in enumerate(log) if name == GATHER]
        assert len(gathers) == len(members) and min(gathers) > stepped
