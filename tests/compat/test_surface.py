"""What of ``deepspeed`` is more than another name."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from longshore.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from longshore.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from longshore.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from longshore.compat.deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, OneCycle, WarmupLR
from longshore.compat.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from ranks import Ranks
from safetensors.torch import load_file
from support import PlainLoop
from torch import nn

import longshore
import longshore.compat.deepspeed as deepspeed
from compat.zero_cases import Experts, Mixture, leaves, made_inside_init, names_of_parameters
from longshore.compat import stage3_names
from longshore.engine.config import WarmupLRConfig
from longshore.engine.schedules import make_schedule

BATCH = {"train_batch_size": 1, "gradient_clipping": 0.0}
NAMED = {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def started(model: nn.Module, **arguments: Any) -> Any:
    return deepspeed.initialize(model=model, **arguments)[0]


def train(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().sum())
    engine.step()


# -- initialize --------------------------------------------------------------------


def test_what_is_passed_stands_in_for_what_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**NAMED, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match=r"names (an optimizer, and optimizer|a scheduler, and lr_scheduler)=") as told:
        engine, mine, loader, schedule = deepspeed.initialize(
            args,
            model,
            optimizer,
            [*model.parameters(), nn.Parameter(torch.ones(1))],  # which nobody looks at beside an optimizer
            lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
    try:
        assert len(told) == 2 and mine is optimizer and isinstance(engine.optimizer, longshore.SGD) and loader is None
        train(engine, torch.ones(1, 4))
        assert schedule.get_last_lr() == engine.get_lr() == [0.25]
        assert args.deepspeed_config == str(path)
    finally:
        engine.destroy()


def test_one_configuration() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="given twice"):
        deepspeed.initialize(argparse.Namespace(deepspeed_config="ds.json"), model, config=NAMED)
    with pytest.raises(ValueError, match="needs config="):
        deepspeed.initialize(model=model)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="gradient_clippin"):
        deepspeed.initialize(model=model, config_params={**NAMED, "gradient_clippin": 1})
    with pytest.raises(ValueError, match="mpu is not supported"):
        deepspeed.initialize(model=model, config=NAMED, mpu=object())


def test_errors_name_the_file(tmp_path: Path) -> None:
    """Also where the engine is given its content, changed; a tool that reads the file itself leaves its keys."""
    content = {**NAMED, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    args = argparse.Namespace(deepspeed_config=str(path))
    dict_of_a_tool = "config (a dict; a tool may have read it from your file)"
    for given, source in (
        ({"args": args}, str(path)),
        ({"config": path}, str(path)),
        ({"config_params": content}, dict_of_a_tool),
    ):
        with pytest.raises(deepspeed.DeepSpeedConfigError) as caught:
            deepspeed.initialize(model=nn.Linear(4, 4), **given)
        assert str(caught.value).startswith(
            f'{source} has 1 problem:\n  zero_optimization.offload_optimizer.device = "nvme": '
        )


def test_there_is_a_group_of_one() -> None:
    assert not dist.is_initialized()
    engine = started(nn.Linear(2, 2), config=NAMED)
    try:
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, 1)
        assert deepspeed.comm.get_all_ranks_from_group(deepspeed.comm.get_world_group()) == [0]
        assert deepspeed.utils.groups.get_data_parallel_world_size() == 1
    finally:
        engine.destroy()
    assert dist.is_initialized()  # several engines use it
    deepspeed.init_distributed(dist_init_required=True)


def test_init_distributed_by_an_address(tmp_path: Path) -> None:
    deepspeed.init_distributed(dist_init_required=False)
    assert not dist.is_initialized()
    deepspeed.init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.is_initialized()
    with pytest.raises(ValueError, match=r"torch\.profiler"):
        deepspeed.init_distributed(config={})


# -- optimizers and schedules ------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "plain", "plain_options"),
    [
        (DeepSpeedCPUAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (DeepSpeedCPUAdam, {"weight_decay": 0.1, "adamw_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
        (FusedAdam, {"betas": (0.8, 0.9)}, torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        (FusedAdam, {"adam_w_mode": False, "weight_decay": 0.2}, torch.optim.Adam, {"weight_decay": 0.2}),
        (DeepSpeedCPUAdagrad, {"weight_decay": 0.1}, torch.optim.Adagrad, {"weight_decay": 0.1}),
    ],
)
def test_optimizers(kind: Any, options: Any, plain: Any, plain_options: Any) -> None:
    """With an engine and without one: that is torch's own, which rounds differently what is beyond 16 elements."""
    torch.manual_seed(0)
    expected, alone, model = (nn.Linear(16, 16) for _ in range(3))
    for other in (alone, model):
        other.load_state_dict(expected.state_dict())
    loop = PlainLoop(expected.parameters(), plain, lr=0.01, **plain_options)
    stepping = kind(alone.parameters(), lr=0.01, **options)
    optimizer = kind(model.parameters(), 0.01, **options)
    assert isinstance(optimizer, kind) and isinstance(optimizer, torch.optim.Optimizer)
    engine = started(model, optimizer=optimizer, config=BATCH)
    try:
        for step in range(3):
            x = torch.full((1, 16), 1.0 + step)
            loop.step(torch.autograd.grad(expected(x).square().sum(), list(expected.parameters())))
            alone(x).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
            train(engine, x)
        for one, two, three in zip(expected.parameters(), alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, two) and torch.equal(one, three)
    finally:
        engine.destroy()


@pytest.mark.parametrize("kind", [DeepSpeedCPULion, FusedLion])
def test_lion(kind: Any) -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(one.state_dict())
    engine = started(one, optimizer=kind(one.parameters(), 1e-2, (0.9, 0.999), 0.1), config=BATCH)
    plain = longshore.Lion(other.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    try:
        for _ in range(2):
            train(engine, torch.ones(1, 4))
            other(torch.ones(1, 4)).square().sum().backward()
            plain.step()
            plain.zero_grad()
        assert torch.equal(one.weight, other.weight) and isinstance(engine.optimizer, longshore.Lion)
    finally:
        engine.destroy()
        plain.close()


def test_without_bias_correction() -> None:
    """torch has no such step, so without an engine it is refused."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    engine = started(model, optimizer=FusedAdam(model.parameters(), bias_correction=False), config=BATCH)
    ours = longshore.AdamW(other.parameters(), weight_decay=0.0, bias_correction=False)
    try:
        train(engine, torch.ones(1, 4))
        other(torch.ones(1, 4)).square().sum().backward()
        ours.step()
        assert torch.equal(model.weight, other.weight)
    finally:
        engine.destroy()
        ours.close()
    alone = FusedAdam(other.parameters(), bias_correction=False)
    with pytest.raises(ValueError, match="which always corrects"):
        alone.step()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False), "states to bf16; leave fp32"),
        (lambda p: FusedAdam(p, set_grad_none=False), "always sets gradients to None"),
        (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), "there is no amsgrad"),
        (lambda p: DeepSpeedCPULion(p, fp32_optimizer_states=False), "states to bf16; leave fp32"),
        (lambda p: DeepSpeedCPUAdagrad(p, fp32_optimizer_states=False), "states to bf16; leave fp32"),
        (lambda p: FusedLion(p, set_grad_none=False), "always sets gradients to None"),
        (lambda p: FusedAdam([nn.Parameter(p[0].bfloat16())]).step(), r"moments in torch\.bfloat16"),
        (lambda p: started(nn.Linear(1, 1), optimizer=FusedAdam(p, amsgrad=True), config=BATCH), "amsgrad"),
    ],
)
def test_optimizer_options_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make([nn.Parameter(torch.ones(4))])


def test_a_subclass_may_step_otherwise_and_is_refused() -> None:
    class Mine(FusedAdam):
        def step(self, closure: Any = None) -> Any:
            raise AssertionError

    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"does not know the optimizer .*Mine"):
        started(model, optimizer=Mine(model.parameters()), config=BATCH)


def test_schedules_are_classes() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    mine = WarmupLR(optimizer, 0.1, 0.5, warmup_num_steps=4)
    assert mine.last_batch_iteration == -1 and optimizer.param_groups[0]["lr"] == 0.1
    named = make_schedule(WarmupLRConfig(warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4), optimizer)
    assert isinstance(named, WarmupLR) and not isinstance(named, OneCycle)
    optimizer.step()
    for _ in range(3):
        mine.step()
        named.step()
        assert mine.get_last_lr() == named.get_last_lr()
    assert mine.last_batch_iteration == 2
    for name in VALID_LR_SCHEDULES:
        assert issubclass(getattr(deepspeed.runtime.lr_schedules, name), torch.optim.lr_scheduler.LRScheduler)
    with pytest.raises(TypeError, match="warmup_min_lr twice"):
        WarmupLR(optimizer, 0.1, warmup_min_lr=0.1)
    with pytest.raises(TypeError, match="5 parameters"):
        WarmupLR(optimizer, *range(6))
    with pytest.raises(ValueError, match=r"last_batch_iteration = 3: must be -1.*load_state_dict"):
        WarmupLR(optimizer, last_batch_iteration=3)


# -- zero --------------------------------------------------------------------------


@pytest.mark.needs_torch("stage 3")
def test_zero_on_two_ranks(two_ranks: Ranks) -> None:
    two_ranks(made_inside_init)


@pytest.mark.needs_torch("stage 3")
def test_names_of_parameters(two_ranks: Ranks) -> None:
    two_ranks(names_of_parameters)


def test_functions_are_compiled_beside_names_of_parameters() -> None:
    stage3_names.show_status()
    with torch.device("meta"):
        assert torch.ones(2).ds_numel == 2  # pyright: ignore
    assert torch.equal(torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(2)), torch.ones(2))


def test_sections_of_a_file_as_objects() -> None:
    offload = deepspeed.runtime.zero.offload_config
    states = offload.DeepSpeedZeroOffloadOptimizerConfig(device=offload.OffloadDeviceEnum.cpu, pin_memory=True)
    assert states.device == "cpu" and states.pin_memory and not hasattr(states, "ratio")
    zero = {"stage": 2, "offload_optimizer": states, "offload_param": offload.DeepSpeedZeroOffloadParamConfig()}
    engine = started(nn.Linear(2, 2), config={**NAMED, "zero_optimization": zero})
    assert (engine.config.offload_device, engine.config.param_device) == ("cpu", "none")
    with pytest.raises(AttributeError, match="optimizer states are where offload_optimizer says"):
        engine.offload_states(include=[offload.OffloadStateTypeEnum.optim_states])
    engine.destroy()
    for section in ({"device": offload.OffloadDeviceEnum.nvme}, {"devise": "cpu"}):
        zero["offload_optimizer"] = offload.DeepSpeedZeroOffloadOptimizerConfig(**section)
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"NVMe is not kept|devise"):
            started(nn.Linear(2, 2), config={**NAMED, "zero_optimization": zero})


@pytest.mark.needs_torch("stage 3")
def test_leaves_are_gathered_as_a_whole(two_ranks: Ranks) -> None:
    two_ranks(leaves)


def test_leaves_are_found_by_class_or_name() -> None:
    utils, model = deepspeed.utils, Mixture()
    assert utils.set_z3_leaf_modules(model, ["Experts"]) == utils.get_z3_leaf_modules(model) == [model.blocks[0]]
    assert utils.unset_z3_leaf_modules(model, [Experts]) == [model.blocks[0]]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [f"{__name__}.Nothing"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="no module of Nothing"):
        utils.set_z3_leaf_modules(model, ["Nothing"])
    utils.set_z3_leaf_module(model.head, True)
    assert utils.z3_leaf_module(model.head)
    # At other stages nothing is gathered, and one rank gathers nothing.
    started(model, config={**NAMED, "zero_optimization": {"stage": 2}}).destroy()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"module": nn.Linear(1, 1)}, "module; build the model inside"),
        ({"mpu": object()}, "mpu; leave it out"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"remote_device": "nvme"}, "not 'nvme'"),
    ],
)
def test_init_refuses(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        deepspeed.zero.Init(**arguments)


def test_a_context_may_be_entered_again() -> None:
    init, made = deepspeed.zero.Init(dtype=torch.bfloat16), []
    assert isinstance(init, deepspeed.zero.Init) and issubclass(deepspeed.zero.GatheredParameters, object)
    for _ in range(2):
        with init, init:
            made.append(nn.Linear(2, 2))
    assert {each.weight.dtype for each in made} == {torch.bfloat16} and nn.Linear(2, 2).weight.dtype == torch.float32
    gathered = deepspeed.zero.GatheredParameters(made[0].parameters())
    for _ in range(2):
        with gathered:
            assert made[0].weight.shape == (2, 2)


def test_dtype_of_init() -> None:
    with deepspeed.zero.Init(dtype=torch.bfloat16, remote_device="cpu"):
        made = nn.Linear(2, 2)
    assert made.weight.dtype == torch.bfloat16 and nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ValueError, match="fwd_module"):
        deepspeed.zero.GatheredParameters(made.parameters(), fwd_module=made)


# -- utils -------------------------------------------------------------------------


def test_repeating_loader() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2
    assert next(iter(loader)) == 2  # it is its own iterator


def test_gradients_are_updated_in_place() -> None:
    model = nn.Linear(2, 2)
    engine = started(model, config=NAMED)
    try:
        engine.backward(engine(torch.ones(1, 2)).sum())
        deepspeed.utils.safe_update_full_grad_vectorized(model.parameters(), lambda grad, param: 3 * grad)
        assert torch.equal(deepspeed.utils.safe_get_full_grad(model.weight), torch.full((2, 2), 3.0))
    finally:
        engine.destroy()


def test_logging(capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed.logger.info("one")
    deepspeed.log_dist("two", ranks=[0])
    deepspeed.log_dist("three", ranks=[1])
    deepspeed.utils.set_log_level_from_string("warning")
    try:
        deepspeed.logger.info("four")
        with pytest.raises(ValueError, match="'loud' is not a valid level"):
            deepspeed.utils.set_log_level_from_string("loud")
    finally:
        deepspeed.logger.setLevel(logging.INFO)
    deepspeed.runtime.utils.see_memory_usage("five")
    deepspeed.runtime.utils.see_memory_usage("six", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("[INFO] ")[1].split(":")[0] for line in lines] == ["one", "[Rank 0] two", "[Rank 0] six"]


def test_seeds() -> None:
    deepspeed.runtime.utils.set_random_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), first)


# -- checkpoints -------------------------------------------------------------------

DEEPSPEED_DATA = Path(__file__).parent / "checkpoint_data"


def test_whole_weights_of_ours(tmp_path: Path) -> None:
    from compat.engine_cases import Tied

    config = {
        **NAMED,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 2},
    }
    model = Tied()
    engine = started(model, config=config)
    engine.backward(engine(torch.arange(4).view(2, 2)).float().logsumexp(-1).mean())
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved", tag="thin", exclude_frozen_parameters=True)
    masters = {name: longshore.utils.safe_get_full_fp32_param(each) for name, each in model.named_parameters()}
    engine.destroy()
    tag = "global_step1"
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", tag)
    assert state.keys() == {*masters, "scale", "head.weight", "seen"}
    assert state["head.weight"] is state["embed.weight"]
    for name, master in masters.items():
        if master is not None:
            assert torch.equal(state[name], master)
    assert not torch.equal(state["embed.weight"], state["embed.weight"].bfloat16().float())  # all digits are there
    loaded = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), tmp_path / "saved", tag)
    assert torch.equal(loaded.head.weight, state["embed.weight"])
    thin = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", tag, exclude_frozen_parameters=True)
    assert thin.keys() == state.keys() - {"scale"}
    thin = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "thin", exclude_frozen_parameters=True)
    assert thin.keys() == state.keys() - {"scale"}
    with pytest.raises(longshore.CheckpointError, match="without frozen parameters"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "thin")
    with pytest.raises(ValueError, match="lazy_mode is not supported"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", lazy_mode=True)
    for frozen in (False, True):
        convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "saved", tmp_path / f"out{frozen}", "1KB", True, tag, exclude_frozen_parameters=frozen
        )
    names = sorted(path.name for path in (tmp_path / "outFalse").iterdir())
    assert "model.safetensors.index.json" in names and len(names) == 3
    assert load_file(tmp_path / "outTrue" / "model.safetensors").keys() == thin.keys() - {"head.weight"}
    for size in ("five", "0GB", True):
        with pytest.raises(ValueError, match="max_shard_size"):
            convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", size)


def test_engine_warns_of_nothing() -> None:
    """What a script did right is not commented on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started(nn.Linear(2, 2), config=NAMED).destroy()


@pytest.mark.parametrize("name", ["stage2_bf16_two_ranks", "stage3_bf16_two_ranks", "stage1_fp32"])
def test_whole_weights_of_deepspeed(name: str) -> None:
    expected = load_file(DEEPSPEED_DATA / name / "expected.safetensors")
    state = get_fp32_state_dict_from_zero_checkpoint(DEEPSPEED_DATA / name)
    masters = {key.removesuffix(" master"): each for key, each in expected.items() if key.endswith(" master")}
    assert masters and state.keys() > masters.keys()
    for key, master in masters.items():
        assert torch.equal(state[key], master), key


def test_a_checkpoint_of_deepspeed_is_not_mistaken_for_none(tmp_path: Path) -> None:
    engine = started(nn.Linear(2, 2), config=NAMED)
    try:
        with pytest.raises(longshore.CheckpointError, match="longshore import-deepspeed"):
            engine.load_checkpoint(DEEPSPEED_DATA / "stage1_fp32")
    finally:
        engine.destroy()
