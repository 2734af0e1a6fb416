"""How a run looks while it goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longshore.byte_sizes import format_byte_size
from longshore.cli.loop import Step, Validation
from longshore.cli.terminal import quantity


class Display(Protocol):
    """A context; ``step`` comes for every step, ``line`` for what should stay on the screen."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...

    def step(self, step: Step, tokens_per_second: float) -> None: ...

    def line(self, text: str) -> None: ...


class BarDisplay:
    """rich's progress bar, with the lines above it."""

    def __init__(self, console: Console, steps: int) -> None:
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps, state="")

    def __enter__(self) -> BarDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: Step, tokens_per_second: float) -> None:
        state = (
            f"loss {step.loss:.4f}  {quantity(tokens_per_second)} tokens/s  "
            f"device {format_byte_size(step.memory.device)}  host {format_byte_size(step.memory.host)}"
        )
        self._progress.update(self._task, completed=step.step, state=state)

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


class LineDisplay:
    """Only the lines; for pipes and files."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: Step, tokens_per_second: float) -> None:
        return None

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)


def make_display(console: Console, steps: int) -> Display:
    return BarDisplay(console, steps) if console.is_terminal else LineDisplay(console)


def step_line(step: Step, steps: int, loss: float, tokens_per_second: float) -> str:
    """One logged step; ``loss`` is the mean since the last one."""
    norm = "" if step.grad_norm is None else f"  norm {step.grad_norm:.3f}"
    return (
        f"step {step.step:>{len(str(steps))}}/{steps}  loss {loss:.4f}  lr {step.lr:.2e}{norm}  "
        f"{quantity(tokens_per_second)} tokens/s  "
        f"device {format_byte_size(step.memory.device)}  host {format_byte_size(step.memory.host)}"
    )


def validation_line(validation: Validation, steps: int) -> str:
    return f"step {validation.step:>{len(str(steps))}}/{steps}  validation loss {validation.loss:.4f}"
