from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import device_type

from longshore.transfer import Copy, CopyStreams, DeviceStreams, FinishedCopy, streams_for, wait_for_all
from longshore.transfer.copy_stream import CopyStream


class Made(Copy):
    """A copy that finishes when it is waited for, unless waiting raises."""

    def __init__(self, failure: BaseException | None) -> None:
        self.target = torch.empty(0)
        self.failure = failure
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.finished = not isinstance(self.failure, KeyboardInterrupt)
        if self.failure is not None:
            raise self.failure


class Stream(CopyStream):
    """Makes such copies; ``ready`` is what waiting for one raises."""

    def _start(self, source: torch.Tensor, target: torch.Tensor, ready: Any, after: Copy | None) -> Copy:
        return Made(ready)

    def after_current(self) -> None:
        raise NotImplementedError

    before_current = after_current


def copied(stream: Stream, source_bytes: int, failure: BaseException | None = None) -> Made:
    source = torch.empty(source_bytes, dtype=torch.uint8)
    copy = stream.copy(source, source, failure)  # pyright: ignore[reportArgumentType]
    assert isinstance(copy, Made)
    return copy


def test_the_oldest_copies_are_waited_for_and_no_more_than_needed() -> None:
    stream = Stream(limit_bytes=100)
    copies = [copied(stream, 40) for _ in range(4)]
    assert [copy.done() for copy in copies] == [True, True, False, False]
    assert stream.peak_bytes == 80


def test_one_copy_is_always_copied() -> None:
    stream = Stream(limit_bytes=100)
    small = copied(stream, 10)
    large = copied(stream, 1000)
    assert small.done() and not large.done()
    copied(stream, 10)
    assert large.done()
    assert stream.peak_bytes == 1000


def test_copies_that_are_done_are_let_go_of() -> None:
    stream = Stream(limit_bytes=100)
    first = copied(stream, 60)
    first.finished = True
    second = copied(stream, 10)
    assert [copy for copy, _ in stream._copies] == [second] and stream._bytes == 10


def test_drain_waits_for_all() -> None:
    stream = Stream(limit_bytes=100)
    copies = [copied(stream, 10) for _ in range(3)]
    stream.drain()
    assert all(copy.done() for copy in copies)
    assert not stream._copies and stream._bytes == 0


def test_a_failed_copy_no_longer_counts() -> None:
    stream = Stream(limit_bytes=100)
    copied(stream, 60, RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        copied(stream, 60)
    assert not stream._copies and stream._bytes == 0
    copied(stream, 60)


def test_a_copy_still_counts_after_its_wait_was_interrupted() -> None:
    stream = Stream(limit_bytes=100)
    copy = copied(stream, 60, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stream.drain()
    assert stream._bytes == 60
    copy.failure = None
    stream.drain()
    assert copy.done() and stream._bytes == 0


def test_a_finished_copy() -> None:
    target = torch.ones(3)
    handle = FinishedCopy(target)
    assert handle.done() and handle.target is target
    handle.wait()


def test_of_several_copies_the_last_is_waited_for_first() -> None:
    """The others are done then."""
    stream, waited = Stream(1 << 20), list[int]()

    class Recorded(Made):
        def wait(self) -> None:
            waited.append(self.order)

    stream._start = lambda *_: Recorded(None)
    copies = [stream.copy(torch.empty(1), torch.empty(1), (), None) for _ in range(3)]
    wait_for_all([copies[1], copies[2], copies[0], copies[2]])
    assert waited == [2, 1, 0]


def test_the_device_chooses_the_transfer() -> None:
    assert isinstance(streams_for(torch.device("cpu")), CopyStreams)
    with pytest.raises(ValueError, match="on the CPU and on torch's accelerator, not on meta"):
        streams_for(torch.device("meta"))


@pytest.mark.gpu
def test_an_accelerator_gets_streams() -> None:
    assert isinstance(streams_for(torch.device(device_type())), DeviceStreams)


def test_nothing_is_copied() -> None:
    transfer = CopyStreams()
    gradient, parameter = torch.ones(5), torch.zeros(5)
    assert not transfer.staged
    handle = transfer.stage(gradient, None, transfer.mark(), None)
    handle.wait()
    assert handle.done()
    assert handle.target.data_ptr() == gradient.data_ptr()
    assert transfer.output_for(parameter, None) is parameter
    assert transfer.read(parameter) is parameter
    transfer.begin_publish()
    published = transfer.publish(parameter, parameter)
    transfer.end_publish()
    assert published.done() and published.target is parameter
    assert torch.equal(parameter, torch.zeros(5))
    transfer.synchronize()
    transfer.close()


def test_the_handle_keeps_the_gradient() -> None:
    transfer = CopyStreams()
    handle = transfer.stage(torch.full((5,), 3.0), None, (), None)
    torch.full((5,), 4.0)  # would take the memory if it were free
    assert torch.equal(handle.target, torch.full((5,), 3.0))


def test_allocate() -> None:
    block = CopyStreams().allocate(100)
    assert block.dtype == torch.uint8 and block.shape == (100,)
