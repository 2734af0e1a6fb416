"""What a rank prints."""

from __future__ import annotations

import contextlib
import io

from support import loss_of

from engine.files import file, started, train


def printed() -> str:
    config = file(dump_state=True, steps_per_print=1, wall_clock_breakdown=True, zero_optimization={"stage": 1})
    with contextlib.redirect_stdout(io.StringIO()) as out, started(config) as engine:
        train(engine, [loss_of(engine, 0)])
    return out.getvalue()
