"""What of a model is computed where, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from longshore.layout.layout import ParameterLayout, Shards
from longshore.plan.job import Job, PlanChoice, Use
from longshore.plan.layout import lay_out
from longshore.plan.reading import plan_of_module
from longshore.plan.workload import MOST_JOBS, segments_of, tile_jobs
from plan.models import llama


def test_segments_are_in_the_order_of_forward() -> None:
    model = llama(3, 64, 96, 160)
    segments = segments_of(model)
    assert [segment.unit for segment in segments] == [None, 0, 1, 2, None, None]
    names = [model.trainable[place].name for segment in segments for place in segment.parameters]
    assert names == [each.name for each in model.parameters]
    embedding, block, *_, head = segments
    assert (embedding.work.looked_up, embedding.work.multiplied) == (160 * 64, 0)
    assert block.work.multiplied == 4 * 64 * 64 + 3 * 64 * 96
    assert block.work.width == 4 * (64 + 64) + 3 * (64 + 96)
    assert block.work.attention == 64
    assert (head.work.logits, head.work.multiplied) == (160, 160 * 64)


def test_a_tied_head_is_computed_last_and_its_gradient_is_complete_last() -> None:
    model = llama(3, 64, 96, 160, tied=True)
    segments = segments_of(model)
    place = next(place for place, each in enumerate(model.trainable) if each.use is Use.HEAD)
    assert segments[-1].work.logits == 160 and place not in segments[-1].parameters
    assert segments[0].parameters[-1] == place  # the last of backward
    brought = [each for segment in segments for each in segment.parameters]
    assert sorted(brought) == list(range(len(model.trainable)))


def test_tiles_wait_for_what_brings_their_gradients() -> None:
    model, job = llama(3, 64, 96, 160), Job(tile_numel=1 << 12)
    segments = segments_of(model)
    for ranks in (1, 2):
        choice = PlanChoice(2, "cpu", speculation="50%")
        layout = lay_out(model, job, choice, ranks, staged=True)
        tiles = tile_jobs(layout, segments)
        sources = {source for tile in tiles for source in tile.sources}
        brought = {segment.key for segment in segments if segment.parameters}
        assert sources == (brought if ranks == 1 else {("bucket", index) for index in range(len(layout.buckets))})
        assert sum(tile.numel for tile in tiles) == sum(each.numel for each in layout.owned)
        # The last ones have the spares.
        ahead = [tile.ahead for tile in tiles]
        assert ahead == sorted(ahead) and 0 < sum(ahead) < len(ahead)


def test_many_small_tiles_are_few_jobs() -> None:
    model, job = llama(3, 64, 96, 160), Job(tile_numel=16)
    choice = PlanChoice(0, "cpu")
    tiles = tile_jobs(lay_out(model, job, choice, 1, staged=True), segments_of(model))
    assert len(tiles) <= MOST_JOBS < model.numel // 16
    assert sum(tile.numel for tile in tiles) == model.numel


class Mixture(nn.Module):
    """As models with experts are in transformers: one tensor for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.config = type(
            "Config", (), {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 8, "num_hidden_layers": 2,
                           "num_attention_heads": 2}
        )  # fmt: skip


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.empty(8, 16, 8, device="meta"))
        self.norm = nn.LayerNorm(8)


def test_a_module() -> None:
    found = plan_of_module(Mixture(), "mixture")
    by_name = {each.name: each for each in found.parameters}
    assert by_name["embed.weight"].use is Use.LOOKED_UP and by_name["lm_head.weight"].use is Use.HEAD
    up = by_name["layers.1.experts.up"]
    assert (up.unit, up.active, up.multiplied, up.width) == (1, 0.25, 256, 0.25 * 8 * 24)
    assert by_name["layers.0.norm.bias"].use is Use.ELEMENTWISE
    assert (found.units, found.vocabulary, found.hidden_size, found.attention_width) == (2, 50, 8, 16)
    assert found.notes == ("each token uses 0.25 of the experts",)


@pytest.mark.parametrize("job", [Job(), Job(optimizer="Muon")], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_ranks_are_not_looked_at(stage: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a plan for thousands of ranks takes no longer than one for eight."""
    looked: list[int] = []
    for owner in (Shards, ParameterLayout):
        monkeypatch.setattr(owner, "shard", _counting(owner.shard, looked))
    counts = []
    for ranks in (8, 1 << 17):
        looked.clear()
        lay_out(llama(8, 64, 96, 160), job, PlanChoice(stage, "cpu"), ranks, staged=True)
        counts.append(len(looked))
    few, many = counts
    # At stage 0 a rank steps the ranges of all shards, up to a number of them.
    assert few > 0 and many == (0 if stage == 0 else few)


def _counting(call: Callable[..., Any], looked: list[int]) -> Callable[..., Any]:
    def counted(self: Any, *args: Any) -> Any:
        looked.append(1)
        return call(self, *args)

    return counted
