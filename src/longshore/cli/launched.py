"""Which of several processes this one is, before torch is there to ask."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_GRACE_S = 5.0


class Place(NamedTuple):
    """A rank of a run; ``speaks``: it says what all ranks of its machine would say."""

    rank: int
    world_size: int
    speaks: bool


ALONE = Place(0, 1, True)


def place() -> Place:
    """By the launcher's variables. What is wrong with them is no matter here: joining the ranks will say so."""
    if not any(name in os.environ for name in _RANK_NAMES):
        return ALONE
    # Behind the test, since it imports torch.
    from longshore.engine.launch import detect

    try:
        launch = detect(os.environ)
    except ValueError:
        return ALONE
    return Place(launch.rank, launch.world_size, launch.local_rank == 0)


def leave_it_to_the_first() -> None:
    """Wait while the first rank of this machine says what ended all of them.

    A launcher ends all ranks as soon as one has ended, and the line would be lost if that was this one.
    """
    time.sleep(_GRACE_S)
