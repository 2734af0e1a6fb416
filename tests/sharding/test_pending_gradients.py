from __future__ import annotations

import pytest
import torch

from longshore.store.rounds import PendingGradients


@pytest.mark.parametrize("lent_after", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_has_the_same_bits_whenever_it_was_lent(lent_after: int, dtype: torch.dtype) -> None:
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    kept, lent = PendingGradients(dtype), PendingGradients(dtype)
    for number, gradient in enumerate(gradients):
        if number == lent_after:
            before = lent.lend([0])[0]
            read = before.clone()
        kept.add(0, gradient)
        lent.add(0, gradient)
    expected = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        expected = expected + gradient.to(dtype)
    assert torch.equal(kept.take([0])[0], expected)
    assert lent.outdated and torch.equal(lent.take([0])[0], expected)
    assert torch.equal(before, read)  # somebody may be reading it still
