from __future__ import annotations

import pytest
import torch

from longshore.transfer import CopyHandle, CudaTransfer, DirectTransfer, FinishedCopy, transfer_for
from longshore.transfer.base import InFlight


class Copy(CopyHandle):
    """A copy that finishes when it is waited for, unless waiting raises."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.target = torch.empty(0)
        self.failure = failure
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.finished = not isinstance(self.failure, KeyboardInterrupt)
        if self.failure is not None:
            raise self.failure


def enqueue(in_flight: InFlight, source_bytes: int, failure: BaseException | None = None) -> Copy:
    in_flight.admit(source_bytes)
    copy = Copy(failure)
    in_flight.add(copy, source_bytes)
    return copy


def test_the_oldest_copies_are_waited_for_and_no_more_than_needed() -> None:
    in_flight = InFlight(limit_bytes=100)
    copies = [enqueue(in_flight, 40) for _ in range(4)]
    assert [copy.done() for copy in copies] == [True, True, False, False]
    assert in_flight.peak_bytes == 80


def test_one_copy_is_always_admitted() -> None:
    in_flight = InFlight(limit_bytes=100)
    small = enqueue(in_flight, 10)
    large = enqueue(in_flight, 1000)
    assert small.done() and not large.done()
    enqueue(in_flight, 10)
    assert large.done()
    assert in_flight.peak_bytes == 1000


def test_copies_that_are_done_are_let_go_of() -> None:
    in_flight = InFlight(limit_bytes=100)
    first = enqueue(in_flight, 60)
    first.finished = True
    in_flight.admit(60)
    assert not in_flight._copies and in_flight._bytes == 0


def test_drain_waits_for_all() -> None:
    in_flight = InFlight(limit_bytes=100)
    copies = [enqueue(in_flight, 10) for _ in range(3)]
    in_flight.drain()
    assert all(copy.done() for copy in copies)
    assert not in_flight._copies and in_flight._bytes == 0


def test_a_failed_copy_no_longer_counts() -> None:
    in_flight = InFlight(limit_bytes=100)
    enqueue(in_flight, 60, RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        in_flight.admit(60)
    in_flight.admit(60)
    assert not in_flight._copies and in_flight._bytes == 0


def test_a_copy_still_counts_after_its_wait_was_interrupted() -> None:
    in_flight = InFlight(limit_bytes=100)
    copy = enqueue(in_flight, 60, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        in_flight.drain()
    assert in_flight._bytes == 60
    copy.failure = None
    in_flight.drain()
    assert copy.done() and in_flight._bytes == 0


def test_a_finished_copy() -> None:
    target = torch.ones(3)
    handle = FinishedCopy(target)
    assert handle.done() and handle.target is target
    handle.wait()


def test_the_device_chooses_the_transfer() -> None:
    assert isinstance(transfer_for(torch.device("cpu")), DirectTransfer)
    with pytest.raises(ValueError, match="cpu and cuda devices, not on meta"):
        transfer_for(torch.device("meta"))


@pytest.mark.gpu
def test_a_cuda_device_gets_streams() -> None:
    assert isinstance(transfer_for(torch.device("cuda")), CudaTransfer)
