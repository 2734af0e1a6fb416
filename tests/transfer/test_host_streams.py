from __future__ import annotations

import torch

from longshore.transfer import CopyStreams


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
