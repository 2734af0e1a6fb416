"""``longshore.save`` and ``longshore.load`` in loops without an engine."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn

import longshore
from checkpoint import one_line_cases as cases
from longshore.checkpoint import one_line
from longshore.checkpoint.files import checksum
from longshore.errors import CheckpointError, NoCheckpointError


def test_a_loop_goes_on(tmp_path: Path) -> None:
    model, optimizer = cases.make()
    cases.train(model, optimizer, 3)
    path = longshore.save(tmp_path, model, optimizer, state={"step": 3})
    assert path == tmp_path / "last"
    cases.train(model, optimizer, 3)
    other, its = cases.make(seed=1, tile_numel=7)
    assert longshore.load(tmp_path, other, its) == {"step": 3}
    cases.train(other, its, 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loaded_state_that_is_the_master_alone_is_saved(tmp_path: Path) -> None:
    """SGD without momentum has no other, and counts no steps."""
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    module = nn.ParameterList([parameter])
    optimizer = longshore.SGD([parameter], lr=0.001)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    kept = optimizer.state[parameter]["master"].clone()
    longshore.save(tmp_path, module, optimizer)
    longshore.load(tmp_path, module, optimizer)
    assert torch.equal(optimizer.state[parameter]["master"], kept) and not kept.eq(1.0).any()


def test_parameters_out_of_the_groups_are_left_out_as_in_a_state_dict(tmp_path: Path) -> None:
    """Of those, one is not even the model's any more, as after pruning."""
    kept, popped, pruned, stranger = (nn.Parameter(torch.ones(5)) for _ in range(4))
    module = nn.ParameterList([kept, popped])
    optimizer = longshore.AdamW([kept, popped, pruned])
    for parameter in (kept, popped, pruned):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[stranger] = {"count": 3}
    del optimizer.param_groups[0]["params"][1:]
    longshore.save(tmp_path, module, optimizer)
    assert [*optimizer.state] == [kept, popped, pruned, stranger]
    longshore.load(tmp_path, module, optimizer)
    assert [*optimizer.state] == [kept]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [*optimizer.state] == [kept]
    optimizer.param_groups[0]["params"].append(popped)
    popped.grad = torch.ones_like(popped)
    optimizer.step()
    assert optimizer.state[popped]["step"] == 1 and optimizer.state[kept]["step"] == 2


class _Parallel(nn.Module):
    """Names its model as DistributedDataParallel and DataParallel do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.module(values)


class _Counting(nn.Sequential):
    """Has an extra state, at the top and without a name of its own."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


_WRAPPERS = {
    "plain": lambda model: model,
    "parallel": _Parallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel compiled": lambda model: _Parallel(torch.compile(model, backend="eager")),
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("loading", _WRAPPERS)
@pytest.mark.parametrize("saving", _WRAPPERS)
def test_wrapped_models_are_the_same(saving: str, loading: str, tmp_path: Path) -> None:
    model, optimizer = cases.make()
    inner = _Counting(*model)
    inner.count = 3
    cases.train(model, optimizer, 1)
    longshore.save(tmp_path, _WRAPPERS[saving](inner), optimizer)
    other, its = cases.make(seed=1)
    inner = _Counting(*other)
    longshore.load(tmp_path, _WRAPPERS[loading](inner), its)
    assert inner.count == 3
    before, after = cases.state_of(model, optimizer), cases.state_of(other, its)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_tensors_that_only_a_wrapper_tells_apart_are_two(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight, model.module = nn.Parameter(torch.ones(2)), nn.Linear(2, 1, bias=False)
    longshore.save(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"module\.module\.weight is \[2\] in"):
        longshore.load(tmp_path, _Parallel(model))


@pytest.mark.quick(0)
@pytest.mark.parametrize(("saving", "loading"), [("plain", "fsdp"), ("fsdp", "plain"), ("fsdp", "fsdp")])
def test_shards_and_whole_tensors(saving: str, loading: str, two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks(cases.save, saving, str(tmp_path))
    for one, other in zip(two_ranks(cases.load, loading, str(tmp_path)), saved, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_engine_goes_on_from_it(dtype: Any, tmp_path: Path) -> None:
    """It has no counters of an engine, no schedule, no loss scale and no random states: these stay as they are."""
    model, optimizer = cases.make(release_gradients=True)
    model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])

    def batch_of(step: int) -> torch.Tensor:
        torch.manual_seed(step + 10)
        return torch.randn(4, 5).to(model[0].weight.dtype)

    for step in range(4):
        model(batch_of(step)).float().pow(2).mean().backward()
        optimizer.step()
        if step == 1:
            longshore.save(tmp_path, model, optimizer, state={"epoch": 7})
    other, _ = cases.make(seed=1)
    groups = [{"params": [*other[0].parameters()], "lr": 5.0}, {"params": [*other[2].parameters()]}]
    options: Any = {"optimizer": {"type": "AdamW", "lr": 1.0}, "loss_scaling": None}
    config = longshore.Config(micro_batch_size=1, dtype=dtype, **options)
    engine = longshore.initialize(model=other, model_parameters=groups, config=config).engine
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match="was saved by longshore.save, and has no counters") as caught:
        path, state = engine.load_checkpoint(tmp_path)
    assert len(caught) == 1 and path == tmp_path / "last" and state == {"epoch": 7}
    assert torch.equal(torch.get_rng_state(), random)
    assert engine.global_steps == 2 and engine.micro_steps == 0
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.02]
    for step in (2, 3):
        engine.backward(engine(batch_of(step)).float().pow(2).mean())
        engine.step()
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    engine.save_checkpoint(tmp_path, keep_last=1)
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["global_step4"]
    engine.destroy()


CASTS: dict[torch.dtype, str] = {
    torch.bfloat16: r"to go on in torch\.bfloat16, cast the model \(model\.bfloat16\(\)\) .* or set bf16\.enabled",
    torch.float16: r"to go on in torch\.float16, cast the model \(model\.half\(\)\) before .* or set fp16\.enabled",
    torch.float32: r"to go on in torch\.float32, leave bf16 and fp16 out of the engine's configuration, and the model",
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("saved, here", [*itertools.permutations(CASTS, 2)])
def test_weights_of_another_dtype_say_how_to_go_on(
    saved: torch.dtype, here: torch.dtype, by_engine: bool, tmp_path: Path
) -> None:
    model, optimizer = cases.make(release_gradients=True)
    model.to(saved)
    longshore.save(tmp_path, model, optimizer)
    other, second = cases.make(seed=1, release_gradients=True)
    other.to(here)
    if by_engine:
        config: Any = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW"}}
        engine = longshore.initialize(model=other, config=config).engine
    with pytest.raises(
        CheckpointError, match=rf"is {saved} in the checkpoint and {here} here[^%]*{CASTS[saved]}"
    ) as told:
        engine.load_checkpoint(tmp_path) if by_engine else longshore.load(tmp_path, other, second)
    assert str(told.value).count("to go on in") == 1
    if by_engine:
        engine.destroy()


def test_an_engine_loads_its_weights_alone(tmp_path: Path) -> None:
    model, optimizer = cases.make()
    cases.train(model, optimizer, 2)
    longshore.save(tmp_path, model, optimizer)
    other, _ = cases.make(seed=1)
    config: Any = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW"}}
    engine = longshore.initialize(model=other, config=config).engine
    path, _ = engine.load_checkpoint(tmp_path, load_module_only=True)
    assert path == tmp_path / "last"
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert engine.global_steps == 0
    engine.destroy()


@pytest.mark.parametrize("where, tag", [("", None), ("step-2", None), ("step-2", "step-2")])
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_a_checkpoint_of_torchs_is_told_with_the_way_to_load_it(where: str, tag: str | None, tmp_path: Path) -> None:
    model, _ = cases.make()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / where, no_dist=True)  # pyright: ignore
    engine = longshore.initialize(
        model=model, config=longshore.Config(micro_batch_size=1), optimizer=longshore.AdamW(model.parameters())
    ).engine
    for load in (functools.partial(longshore.load, model=model), engine.load_checkpoint):
        with pytest.raises(CheckpointError, match=r"was written by torch.distributed.checkpoint: load it") as raised:
            load(tmp_path, tag=tag)
        assert not isinstance(raised.value, NoCheckpointError)
    longshore.save(tmp_path, model)  # a folder that has both
    longshore.load(tmp_path, model, tag="last")
    if where:
        longshore.load(tmp_path, model)
    engine.destroy()


def test_gradients_on_the_host_are_not_lost(tmp_path: Path) -> None:
    model, optimizer = cases.make(release_gradients=True)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(CheckpointError, match="right after step"):
        longshore.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    model, optimizer = cases.make()
    cases.train(model, optimizer, 1)
    longshore.save(tmp_path, model, optimizer)
    before: dict[str, Any] = {}
    other = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 9))
    its = longshore.Lion(other.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        longshore.load(tmp_path, other, its)
    for line in (
        "0.weight is [3, 5] in the checkpoint and [4, 5] here",
        "1.bias is missing in the checkpoint",
        "2.weight of the checkpoint is not in this model",
        "the checkpoint was saved from AdamW, and this optimizer is Lion",
    ):
        assert line in str(raised.value)
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.warns(UserWarning, match="fits only partly"):
        longshore.load(tmp_path, other, its, strict=False)


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.filterwarnings("ignore:.* was saved by longshore.save, and has no counters:UserWarning")
def test_states_that_nothing_here_steps_are_named(by_engine: bool, tmp_path: Path) -> None:
    """The body is frozen now, so that its state would be lost. The order is that of a run: saved, stepped, loaded."""
    model, optimizer = cases.make(release_gradients=by_engine)
    cases.train(model, optimizer, 2)
    longshore.save(tmp_path, model, optimizer)
    saved = {key: value.clone() for key, value in optimizer.state[model[2].bias].items()}
    other, _ = cases.make(seed=1)
    for parameter in [*other.parameters()][:3]:
        parameter.requires_grad_(False)
    before = other[0].weight.clone()
    if by_engine:
        config: Any = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW"}}
        engine = longshore.initialize(model=other, config=config).engine
        its, load = engine.optimizer, functools.partial(engine.load_checkpoint, tmp_path)
    else:
        its = longshore.AdamW([other[2].bias])
        load = functools.partial(longshore.load, tmp_path, other, its)
    said = (
        "the checkpoint has the optimizer's state of 0.bias, 0.weight, 2.weight, and no parameter group here has them"
    )
    with pytest.raises(CheckpointError, match=said):
        load()
    assert torch.equal(other[0].weight, before) and not its.state.get(other[2].bias)
    with pytest.warns(UserWarning, match=said):
        load(strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert saved.keys() == its.state[other[2].bias].keys()
    for key, value in saved.items():
        assert torch.equal(its.state[other[2].bias][key], value)
    its.close()


def test_weights_alone_name_no_states(tmp_path: Path) -> None:
    model, optimizer = cases.make()
    cases.train(model, optimizer, 1)
    longshore.save(tmp_path, model, optimizer)
    longshore.load(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_other_way_to_add_backwards_is_said(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = cases.make(release_gradients=True)
    model.to(dtype)
    longshore.save(tmp_path, model, optimizer)
    other, kept = cases.make()
    other.to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        longshore.load(tmp_path, model, optimizer)
        assert caught == []
        longshore.load(tmp_path, other, kept)
    said = [str(each.message) for each in caught]
    assert len(said) == (dtype == torch.bfloat16)
    assert all("was saved with release_gradients=True, and here it is False" in each for each in said)


def test_only_our_optimizers(tmp_path: Path) -> None:
    model, _ = cases.make()
    with pytest.raises(TypeError, match="state_dict"):
        longshore.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_run_that_goes_on_prunes_its_own(tmp_path: Path) -> None:
    """As a process of its own would, which knows nothing of the one before."""
    model, optimizer = cases.make()
    for number in range(4):
        one_line._RUNS.clear()
        if number:
            longshore.load(tmp_path, model, optimizer)
        cases.train(model, optimizer, 1)
        longshore.save(tmp_path, model, optimizer, f"step{number}", keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step2", "step3"]


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5, "2"])
def test_a_number_of_checkpoints_to_keep_that_is_none_removes_nothing(keep_last: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for tag in "ab":
        longshore.save(tmp_path, model, tag=tag)
    with pytest.raises(ValueError, match="keep_last is the number of checkpoints that stay, at least 1, not"):
        longshore.save(tmp_path, model, tag="c", keep_last=keep_last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_gradients_on_the_host_are_not_stepped_into_what_is_loaded(tmp_path: Path) -> None:
    model, optimizer = cases.make(release_gradients=True)
    longshore.save(tmp_path, model, optimizer)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(CheckpointError, match="would be applied to the loaded weights: load right after step"):
        longshore.load(tmp_path, model, optimizer)
    optimizer.zero_grad()
    longshore.load(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    "value", [torch.zeros(2, dtype=torch.complex64), {"a": [torch.zeros(2, dtype=torch.complex64)]}]
)
def test_a_dtype_that_cannot_be_saved_is_named_by_its_key(value: Any, tmp_path: Path) -> None:
    model, optimizer = cases.make()
    with pytest.raises(CheckpointError, match=r"client_state\['mine'\].* is torch.complex64"):
        longshore.save(tmp_path, model, optimizer, state={"mine": value})


def test_frozen_and_left_out_is_not_trained(tmp_path: Path) -> None:
    model, _ = cases.make()
    model[0].requires_grad_(False)
    config = longshore.Config(optimizer={"type": "AdamW", "lr": 1.0}, micro_batch_size=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = longshore.initialize(model=model, model_parameters=trained, config=config).engine
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    other, _ = cases.make(seed=1)
    with pytest.raises(CheckpointError, match=r"0.weight was frozen and left out .* and is trained here"):
        longshore.load(tmp_path, other)


@pytest.mark.parametrize("async_save", [False, True])
def test_stages_of_a_pipeline(async_save: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(cases.save_stages, str(tmp_path), async_save)
    assert not first.keys() & second.keys()
    for stages, lrs in (([[0, 1], [2]], [0.01, 0.5]), ([[2], [0, 1]], [0.5, 0.01])):
        loaded = two_ranks(cases.load_stages, str(tmp_path), stages)
        both = {**loaded[0][0], **loaded[1][0]}
        assert both.keys() == {*first, *second}
        for name, value in {**first, **second}.items():
            assert torch.equal(both[name], value), name
        assert [list(map(float, buffers)) for _, buffers, _ in loaded] == stages
        assert [lr for *_, lr in loaded] == lrs


def test_the_whole_model_loads_the_stages_of_a_pipeline(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(cases.save_stages, str(tmp_path), False)
    model = cases.Stage([0, 1, 2], seed=50)
    optimizer = longshore.AdamW([{"params": [*layer.parameters()]} for layer in model.children()], lr=1.0)
    longshore.load(tmp_path, model, optimizer)
    loaded = cases.state_of(model, optimizer)
    assert loaded.keys() == {*first, *second}
    for name, value in {**first, **second}.items():
        assert torch.equal(loaded[name], value), name
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01, 0.5]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("values", "layer0.weight: ranks 0 and 1 differ in values"),
        ("shape", "layer0.weight: ranks 0 and 1 differ in shape"),
        ("master", "layer0.weight: ranks 0 and 1 differ in exp_avg"),
        ("lr", "layer0.weight: ranks 0 and 1 differ in lr"),
        ("kind", "the ranks' optimizers are AdamW and Lion"),
    ],
)
def test_ranks_with_other_contents_of_one_name_are_refused_on_all(
    change: str, text: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    one, other = two_ranks(cases.refused_stage, str(tmp_path), change)
    assert text in one
    assert one == other
    assert not list(tmp_path.iterdir())


def test_ranks_with_the_same_are_saved_once(two_ranks: Ranks, tmp_path: Path) -> None:
    saved, same = two_ranks(cases.save_same, str(tmp_path))
    model, optimizer = cases.Stage([0, 1], seed=50).make()
    longshore.load(tmp_path, model, optimizer)
    loaded = {**cases.state_of(model, optimizer), "seen0": model.seen0}
    for name, value in saved.items():
        assert torch.equal(loaded[name], value) and torch.equal(value, same[name]), name


def test_ranks_that_give_different_folders_save_independently(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.own_folders, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage0", "stage1"]


def test_sharded_stages_of_a_pipeline(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.sharded_stages, str(tmp_path))


def test_under_ddp_rank_0_saves_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(cases.averaged, str(tmp_path)) == [True, True]


@pytest.mark.slow
def test_a_rank_that_does_not_save_is_an_error(tmp_path: Path) -> None:
    ranks = Ranks(2, timeout_s=10)
    try:
        assert "have to be called on all ranks" in ranks(cases.rank_zero_alone, str(tmp_path))[0]
    finally:
        ranks.stop()


@pytest.mark.medium
def test_stages_save_again(tmp_path: Path, four_ranks: Ranks) -> None:
    four_ranks(cases.stages_saved_again, str(tmp_path))


def test_a_checksum_sees_every_change() -> None:
    torch.manual_seed(0)
    for numel in (0, 1, 7, 2048, 5000):
        for dtype in (torch.bfloat16, torch.float32):
            values = torch.randn(numel + 1).to(dtype)
            one = checksum(values[1:])
            assert one == checksum(values[1:].clone())
            for place in {0, numel // 2, numel - 1} if numel else ():
                other = values[1:].clone()
                other[place] *= -1
                assert checksum(other) != one
            if numel > 1:
                assert checksum(values[1:].flip(0)) != one
    signs = torch.ones(4096)
    signs[3] = -1
    assert checksum(signs) != checksum(signs.roll(2)) != checksum(signs.roll(512))
