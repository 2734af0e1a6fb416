"""Batch sizes of a running engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longshore.engine.config import Config


@dataclass(frozen=True)
class BatchSizes:
    """Samples a backward and rank, backwards a step, and ranks (those of tensor parallelism together count as one)."""

    micro_batch_size: int
    accumulation_steps: int
    world_size: int

    @classmethod
    def of(cls, config: Config) -> BatchSizes:
        """From a resolved configuration."""
        train, micro, steps = config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
        assert train is not None and micro is not None and steps is not None
        return cls(micro, steps, train // (micro * steps))

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def with_accumulation_steps(self, steps: int) -> BatchSizes:
        """Return the sizes with another number of backwards a step.

        Raises:
            ValueError: ``steps`` is not an integer of at least 1.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps is a number of backwards, at least 1, not {steps!r}")
        return replace(self, accumulation_steps=steps)

    def with_micro_batch_size(self, micro_batch_size: int) -> BatchSizes:
        """Return the sizes with another number of samples a backward.

        Raises:
            ValueError: ``micro_batch_size`` is not an integer of at least 1.
        """
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(f"the micro batch size is a number of samples, at least 1, not {micro_batch_size!r}")
        return replace(self, micro_batch_size=micro_batch_size)

    def steps_for(self, train_batch_size: int) -> int:
        """Accumulation steps that make up this train batch size.

        Raises:
            ValueError: it is not a multiple of the samples of one backward on all ranks.
        """
        unit = self.micro_batch_size * self.world_size
        if isinstance(train_batch_size, bool) or not isinstance(train_batch_size, int) or train_batch_size < unit:
            raise ValueError(
                f"train_batch_size is a multiple of {unit} (micro batch {self.micro_batch_size} x {self.world_size} "
                f"ranks), not {train_batch_size!r}"
            )
        if train_batch_size % unit:
            below = train_batch_size // unit * unit
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {unit} (micro batch {self.micro_batch_size} "
                f"x {self.world_size} ranks); {below} and {below + unit} are"
            )
        return train_batch_size // unit
