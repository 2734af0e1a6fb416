"""``longshore train --trace``: a trace of a few steps, as an HTML page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import longshore
from longshore.cli.output import RunFolder, check_writable, save_file
from longshore.cli.settings import LoopSettings
from longshore.cli.terminal import SettingsError, plural
from longshore.tracing import Trace

_OPTION = "--trace"
_STEPS = 3


def traced_steps(loop: LoopSettings) -> range:
    """Return three steps in the middle of the run, or fewer, with no validation between them.

    The first step is avoided, since it allocates. A validation would be measured as part of the step after it.
    """
    for count in range(_STEPS, 0, -1):
        middle = (loop.steps - count) // 2 + 1
        for first in sorted(range(middle - _STEPS, middle + _STEPS + 1), key=lambda first: abs(first - middle)):
            steps = range(first, first + count)
            validated = loop.eval_every and any(step % loop.eval_every == 0 for step in steps[:-1])
            if first >= 2 and steps[-1] <= loop.steps and not validated:
                return steps
    return range(1, 2)


def check_trace(page: Path, folder: RunFolder | None) -> None:
    """Raise now what :meth:`StepTrace.save` would raise at the end; ``folder`` is that of ``--out``."""
    check_writable(page, _OPTION)
    beside = page.with_suffix(".json")
    if beside == page:
        raise SettingsError(f"{_OPTION} {page} is the page, and {beside.name} is for JSON beside it: name it .html")
    check_writable(beside, _OPTION)
    for path in (page, beside):
        if folder is not None and folder.needs(path):
            raise SettingsError(
                f"{_OPTION} {page} would be {path}, which the run in --out {folder.path} needs: choose another name"
            )


class StepTrace:
    """Traces the ``traced_steps`` of a loop that does each step in the context :meth:`around`.

    Args:
        page: the path of ``--trace``. JSON for Perfetto with the same events is written beside it.
        optimizer: one of longshore's.
    """

    def __init__(self, page: Path, optimizer: Any, loop: LoopSettings) -> None:
        self._page = page
        self._optimizer = optimizer
        self._steps = traced_steps(loop)
        self._block = ExitStack()
        self._trace: Trace | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Do a step, whose number begins at 1, in this context."""
        if step == self._steps[0]:
            self._trace = self._block.enter_context(longshore.trace(self._optimizer))
        try:
            yield
        except BaseException:
            self._block.close()
            raise
        if step == self._steps[-1]:
            self._block.close()

    def save(self) -> str:
        """Write both files after training, and return the summary.

        Raises:
            CommandError: a file cannot be written.
        """
        self._block.close()  # a signal ended the run in the middle
        if self._trace is None:
            return f"nothing was traced: the run ended before step {self._steps[0]}"
        beside = self._page.with_suffix(".json")
        save_file(self._page, self._trace.save_html, _OPTION)
        save_file(beside, self._trace.save_chrome, _OPTION)
        summary = self._trace.summary()
        return (
            f"traced: {plural(summary.steps, 'step')} from step {self._steps[0]}, rank {self._trace.rank}\n{summary}\n"
            f"written to {self._page} and {beside}"
        )
