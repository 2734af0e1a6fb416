"""Where one ``loss.backward()`` ends and the next begins, when nobody says so."""

from __future__ import annotations

from collections.abc import Callable

import torch


class RawBackwards:
    """Calls ``on_end`` after each backward in which a gradient arrived.

    It uses the autograd engine's end-of-backward callback, which is private and
    is skipped when backward raises; with reentrant checkpointing it also comes
    at the end of each inner backward. So nothing may depend on it but which
    gradients are reduced together.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._task: int | None = None
        """The backward that the callback waits for."""

    def arrived(self) -> None:
        """Called from a hook: a gradient arrived."""
        task = torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]
        if task in (-1, self._task):
            return
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # pyright: ignore

    def _ended(self) -> None:
        self._task = None
        self._on_end()
