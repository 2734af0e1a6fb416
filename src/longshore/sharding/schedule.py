"""What several ranks add to the schedule of a tile (:mod:`longshore.host.events`), as data."""

from __future__ import annotations

from collections.abc import Mapping

from longshore.host.events import ARRIVE, COPY_TO_HOST, NORM, PUBLISH, SCHEDULE, STEP_IN_PLACE, Lane, Row, Which

REDUCE = "reduce"
"""Of one bucket; its event is that of every tile with a part of it."""
GATHER = "gather"
"""Of one bucket's parameters, stages 1 and 2; at stage 3 of one unit's, before it is used."""

SHARDED_SCHEDULE: Mapping[str, Row] = {
    **SCHEDULE,
    REDUCE: Row(Lane.COLLECTIVES, ((ARRIVE, Which.SAME),)),
    COPY_TO_HOST: Row(Lane.TO_HOST, ((REDUCE, Which.SAME),)),
    NORM: Row(Lane.HOST, ((ARRIVE, Which.ALL), (REDUCE, Which.ALL), (COPY_TO_HOST, Which.ALL))),
    GATHER: Row(Lane.COLLECTIVES, ((STEP_IN_PLACE, Which.ALL), (PUBLISH, Which.ALL))),
}
