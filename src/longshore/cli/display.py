"""The progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longshore.cli.loop import Step, Validation
from longshore.cli.steppers import MemoryUse
from longshore.cli.terminal import byte_quantity, quantity


class Display:
    """A context in which ``step`` moves the bar, where there is one, and ``line`` prints above it."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, state="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: Step, tokens_per_second: float) -> None:
        state = f"loss {step.loss:.4f}  {_figures(tokens_per_second, step.memory)}"
        self._bar.update(self._task, completed=step.step, state=state)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)


def step_line(step: Step, steps: int, loss: float, tokens_per_second: float) -> str:
    """Return the line of a logged step; ``loss`` is the mean since the last one."""
    norm = "" if step.grad_norm is None else f"  norm {step.grad_norm:.3f}"
    return (
        f"step {step.step:>{len(str(steps))}}/{steps}  loss {loss:.4f}  lr {step.lr:.2e}{norm}  "
        f"{_figures(tokens_per_second, step.memory)}"
    )


def validation_line(validation: Validation, steps: int) -> str:
    return f"step {validation.step:>{len(str(steps))}}/{steps}  validation loss {validation.loss:.4f}"


def _figures(tokens_per_second: float, memory: MemoryUse) -> str:
    return (
        f"{quantity(tokens_per_second)} tokens/s  "
        f"device {byte_quantity(memory.device)}  host {byte_quantity(memory.host)}"
    )
