"""Which window a rank is in, as ranks tell each other when they meet."""

from __future__ import annotations


class WindowCount:
    """Windows that were applied or given up: the same number on all ranks that meet.

    A rank that gives up counts at once, and tells the others when it meets them next. They count with it when they
    are told, and not once more when they discard what they have of that window. Otherwise one that learns of it in a
    forward, and one that learns of it in ``step()``, would never meet again.
    """

    def __init__(self) -> None:
        self.number = 0
        self._told = False

    def applied(self) -> None:
        """The window was stepped."""
        self.number += 1

    def hear(self, number: int) -> None:
        """Another rank gave up its window, and is at window ``number`` since."""
        if number > self.number:
            self.number, self._told = number, True

    @property
    def told(self) -> bool:
        """Whether another rank gave up the window that this one has not discarded yet."""
        return self._told

    def give_up(self) -> bool:
        """This rank gives up its window. Whether the others have to be told."""
        if self._told:
            return False
        self.number += 1
        return True

    def discarded(self) -> None:
        """The window is discarded here: what fails from now on is another one."""
        self._told = False
