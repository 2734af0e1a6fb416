"""Who writes a step's numbers: TensorBoard, Weights & Biases, or a CSV file."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from longshore.engine.config.model import CsvConfig, TensorBoardConfig, WandbConfig


class Writer(ABC):
    """Takes one step's numbers at a time, in order."""

    name: str

    @abstractmethod
    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        """``values`` after ``samples`` samples of training; may raise whatever the library raises."""

    @abstractmethod
    def close(self) -> None:
        """Everything is written."""


class TensorBoardWriter(Writer):
    name = "tensorboard"

    def __init__(self, config: TensorBoardConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.output_path) / config.job_name))

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(Writer):
    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self._wandb = wandb
        self._own = wandb.run is None
        if self._own:
            wandb.init(project=config.project, entity=config.team, group=config.group)

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._wandb.log({**known, "Train/Samples": samples})

    def close(self) -> None:
        if self._own:
            self._wandb.finish()


class CsvWriter(Writer):
    """A row a step; a run that goes on appends to the file that is there."""

    name = "csv_monitor"

    def __init__(self, config: CsvConfig) -> None:
        self._path = Path(config.output_path) / config.job_name / "metrics.csv"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"csv_monitor cannot write to {self._path}: {error.strerror}; give a folder as csv_monitor.output_path"
            ) from error
        # From the first row on.
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        row = {"samples": samples, **values}
        if self._file is None:
            self._columns = list(row)
            self._file = self._opened(self._columns)
        csv.writer(self._file).writerow([row.get(column) for column in self._columns])
        self._file.flush()

    def _opened(self, columns: list[str]) -> TextIO:
        """Append where the columns are the same; otherwise what is there keeps its name with a number."""
        if self._path.exists():
            with open(self._path, newline="") as former:
                header = next(csv.reader(former), None)
            if header != columns:
                number = 1
                while (aside := self._path.with_name(f"metrics.{number}.csv")).exists():
                    number += 1
                self._path.rename(aside)
        begins = not self._path.exists()
        file = open(self._path, "a", newline="")  # noqa: SIM115  (closed by close())
        if begins:
            csv.writer(file).writerow(columns)
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
