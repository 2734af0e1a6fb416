"""The order in which a step's gradients are added: equal descriptions are equal bits, by the arithmetic of the docs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from longshore.engine.config import Config
from longshore.engine.config.model import BETWEEN_RANKS, OF_EACH_RANK, decisive, order_of_sums


def summed(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def gradient_of(stage: int, ranks: int, backwards: int, gradients: Tensor) -> Tensor:
    """docs/arithmetic.md: the mean of the ranks' sums over backwards, or the sum over backwards of the ranks' means."""
    terms = [[gradients[ranks * k + r] * (1 / backwards) for k in range(backwards)] for r in range(ranks)]
    if stage < 2:
        return summed([summed(of_rank) for of_rank in terms]) * (1 / ranks)
    return summed([summed(list(of_backward)) * (1 / ranks) for of_backward in zip(*terms, strict=True)])


def test_equal_descriptions_are_equal_bits() -> None:
    same, other = 0, 0
    for numel in (1, 2, 3, 4, 6, 8, 12):
        gradients = torch.randn(numel, 4096, generator=torch.Generator().manual_seed(numel))
        found = [
            (order_of_sums(stage, ranks, numel // ranks, True), gradient_of(stage, ranks, numel // ranks, gradients))
            for stage, ranks in itertools.product((1, 2), range(1, numel + 1))
            if numel % ranks == 0
        ]
        for (here, one), (there, two) in itertools.combinations(found, 2):
            assert (here == there) == torch.equal(one, two), (numel, here, there)
            same, other = same + (here == there), other + (here != there)
    assert same > 10 and other > 50


def test_what_rounds_on_its_way_is_of_its_ranks() -> None:
    assert order_of_sums(2, 1, 4, True) == order_of_sums(0, 4, 1, True) != order_of_sums(0, 4, 1, False)
    assert order_of_sums(2, 1, 4, False) == order_of_sums(2, 1, 4, True)


def test_settings_that_change_bits() -> None:
    alone, two = (decisive(Config(stage=1), world_size) for world_size in (1, 2))
    assert set(alone) == {*OF_EACH_RANK}
    assert set(two) == {*OF_EACH_RANK, *BETWEEN_RANKS, "stage"}
    assert decisive(Config(stage=0), 2) == two != decisive(Config(stage=2), 2) == decisive(Config(stage=3), 2)
    assert decisive(Config(dtype="bf16", tile_numel=64, offload_device="cpu"), 1) == alone
    assert decisive(Config(dtype="bf16", cast_inputs=True), 1) != decisive(Config(dtype="fp16", cast_inputs=True), 1)
