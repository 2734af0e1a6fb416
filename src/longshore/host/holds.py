"""Pages that another thread still reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import Tensor


class PageHolds:
    """Which pages are to stay as they are, because a snapshot has not read them yet.

    The thread that trains holds pages and takes tiles away from them; the one that reads lets go of them. A page that
    no tile has any more goes back to its pool once it is read, in :meth:`collect`, on the thread that trains.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[int] = set()
        """By address."""
        self._left: dict[int, tuple[Tensor, Callable[[Tensor], None]]] = {}
        """Held pages that no tile has, and what takes each of them back."""
        self._read: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        """Of those, the ones that are held no more."""
        self.left_bytes = 0
        """Of the pages that no tile has and no pool yet."""

    def __contains__(self, page: Tensor) -> bool:
        return page.data_ptr() in self._held

    def __bool__(self) -> bool:
        return bool(self._held) or self.left_bytes > 0

    def hold(self, pages: Iterable[Tensor]) -> None:
        with self._changed:
            self._held.update(page.data_ptr() for page in pages)

    def release(self, page: Tensor) -> None:
        """It has been read. From any thread."""
        with self._changed:
            self._held.discard(page.data_ptr())
            left = self._left.pop(page.data_ptr(), None)
            if left is not None:
                self._read.append(left)
            self._changed.notify_all()

    def leave(self, page: Tensor, take_back: Callable[[Tensor], None]) -> bool:
        """No tile has the page any more; false where nobody holds it: ``take_back`` may have it at once."""
        with self._changed:
            if page.data_ptr() not in self._held:
                return False
            self._left[page.data_ptr()] = page, take_back
            self.left_bytes += page.nbytes
            return True

    def collect(self) -> None:
        """Pools take back what was read."""
        with self._changed:
            read, self._read = self._read, []
            self.left_bytes -= sum(page.nbytes for page, _ in read)
        for page, take_back in read:
            take_back(page)

    def wait_for(self, page: Tensor) -> None:
        """Until ``page`` is held no more, or another one that was left can be collected."""
        with self._changed:
            self._changed.wait_for(lambda: page.data_ptr() not in self._held or bool(self._read))
