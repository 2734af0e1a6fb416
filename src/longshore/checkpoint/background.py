"""One piece of work at a time, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

_LOGGER = logging.getLogger("longshore")


class Background:
    """Work that goes on beside training. What it raised is logged at once, and raised by the next :meth:`wait`."""

    def __init__(self) -> None:
        self._done: threading.Event | None = None
        """Of the work under way; a thread's own join() takes it for ended once Ctrl-C ended a wait for it."""
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.is_set()

    def start(self, work: Callable[[], object], what: str, give_up: Callable[[], None]) -> None:
        """After :meth:`wait`.

        Args:
            work: ends by itself; a process that comes to its end waits for it.
            what: it does, for the log.
            give_up: called instead, where no thread could be started.
        """
        assert self._done is None
        done = threading.Event()

        def run() -> None:
            try:
                work()
            except BaseException as failure:
                # Its frames hold what was to be written.
                traceback.clear_frames(failure.__traceback__)
                self._failure = failure
                _LOGGER.error("%s failed: %s", what, failure)
            finally:
                done.set()

        thread = threading.Thread(target=run, name="longshore-checkpoint")
        self._done = done
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # otherwise it runs, and Ctrl-C came while it was started
                self._done = None
                give_up()
            raise

    def wait(self) -> None:
        """Until it is done. Raises what it raised, once; Ctrl-C ends the wait, and not the work."""
        if self._done is not None:
            self._done.wait()
            self._done = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
