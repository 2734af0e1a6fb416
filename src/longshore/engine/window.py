"""When a step is due: counted, never assumed."""

from __future__ import annotations

from longshore.errors import LongshoreError


class Window:
    """The accumulation window as the engine's caller sees it: backwards, boundary, number of steps to accumulate.

    Args:
        accumulation_steps: backwards a step, unless a boundary says otherwise.
    """

    def __init__(self, accumulation_steps: int) -> None:
        self.accumulation_steps = accumulation_steps
        self.boundary: bool | None = None
        """What the user last declared; None: nothing was."""
        # Of one window.
        self.backwards = 0
        self.calls = 0
        """Of ``step()`` that were not due."""

    @property
    def open(self) -> bool:
        """Whether anything happened since the last applied or discarded step."""
        return self.backwards > 0 or self.calls > 0

    def set_accumulation_steps(self, steps: int) -> None:
        """Raises LongshoreError in the middle of a window."""
        if steps != self.accumulation_steps and self.open:
            raise LongshoreError(
                f"gradient_accumulation_steps was to change from {self.accumulation_steps} to {steps} in the middle of "
                f"a window ({self.backwards} backwards were scaled by the old number); change it right after a step "
                "that was applied, or discard the window with zero_grad()"
            )
        self.accumulation_steps = steps

    def at_boundary(self) -> bool:
        """Whether the backward that is under way, or has just ended, is the last of its window."""
        if self.boundary is not None:
            return self.boundary
        return max(self.calls + 1, self.backwards) >= self.accumulation_steps

    def next_is_last(self) -> bool:
        """Whether the backward that is about to begin is the last of its window, as far as is known."""
        if self.boundary is not None:
            return self.boundary
        return max(self.calls, self.backwards) + 1 >= self.accumulation_steps

    def due(self, raw_backwards: bool) -> bool:
        """Whether a ``step()`` now is to be applied.

        Args:
            raw_backwards: gradients came that ``engine.backward()`` did not bring.

        Raises:
            LongshoreError: nobody can know.
        """
        if self.boundary is not None:
            return self.boundary
        if self.accumulation_steps == 1:
            return True
        if raw_backwards:
            raise LongshoreError(
                f"gradients came from loss.backward(), which the engine does not count, and "
                f"gradient_accumulation_steps is {self.accumulation_steps}: call engine.backward(loss), or say with "
                "engine.set_gradient_accumulation_boundary(True or False) which step() is to be applied"
            )
        return self.backwards >= self.accumulation_steps

    def close(self) -> None:
        """The step was applied or skipped, or the window discarded."""
        self.backwards = self.calls = 0
