"""Where a run's numbers go, under the names of DeepSpeed's files."""

from __future__ import annotations

from typing import Annotated

from longshore.engine.config.base import FrozenModel
from longshore.engine.config.values import TEXT, checked

_Text = Annotated[str, checked(TEXT)]
_MaybeText = Annotated[str | None, checked(TEXT)]


class TensorBoardConfig(FrozenModel):
    """TensorBoard's event files in ``output_path/job_name``."""

    output_path: _Text = "runs"
    job_name: _Text = "longshore"


class WandbConfig(FrozenModel):
    """A run of Weights & Biases, or the one that is active already. ``team`` is its entity."""

    project: _MaybeText = None
    team: _MaybeText = None
    group: _MaybeText = None


class CsvConfig(FrozenModel):
    """``metrics.csv`` in ``output_path/job_name``: a row a step."""

    output_path: _Text = "runs"
    job_name: _Text = "longshore"
