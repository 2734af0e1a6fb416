from __future__ import annotations

import threading

import pytest
import torch

from longshore.transfer import Copy


class Gate(Copy):
    """A copy that is done when the test says so: a stream that is told to wait for it stands still."""

    def __init__(self) -> None:
        self.target = torch.empty(0)
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def done(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        assert self._open.wait(timeout=20), "nobody opened the gate"


@pytest.fixture
def gate() -> Gate:
    return Gate()
