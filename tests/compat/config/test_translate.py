"""From a DeepSpeed file to a Config."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.files import USERS_BLOCK

from longshore.engine.config import (
    AdamConfig,
    AdamWConfig,
    Config,
    ConfigError,
    FlopsProfilerConfig,
    LoadedConfig,
    LossScaling,
    OneCycleConfig,
    SGDConfig,
    WarmupDecayLRConfig,
    WarmupLRConfig,
    load_config,
)


def load(**file: Any) -> LoadedConfig:
    """A file that is otherwise complete and says nothing."""
    return load_config({"train_batch_size": 8, "gradient_clipping": 1.0, **file})


def refusal(**file: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**file)
    return str(caught.value)


def test_a_real_users_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(USERS_BLOCK)
    loaded = load_config(path, world_size=1)
    assert loaded.config == Config(
        train_batch_size=1,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        stage=2,
        offload_device="cpu",
        reduce_bucket_numel=50_000_000,
        allgather_bucket_numel=50_000_000,
        overlap_comm=True,
        gradient_clipping=1.0,
        optimizer=AdamWConfig(lr=1e-4, weight_decay=0.0),
    )
    (note,) = loaded.notes
    assert "gradient_clipping is not given" in note
    assert load_config(str(path)) == load_config(json.loads(USERS_BLOCK))


@pytest.mark.parametrize("section", ["activation_checkpointing", ""])
def test_checkpoint_activations_is_no_key(section: str) -> None:
    file = json.loads(USERS_BLOCK)
    (file[section] if section else file)["checkpoint_activations"] = True
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.path == f"{section}.checkpoint_activations".lstrip(".")
    assert f'"checkpoint_activations" is not a key of {section or "the file"}' in problem.what
    assert "longshore.checkpointing" in problem.what and "remove the key" in problem.what


@pytest.mark.parametrize(
    "section, kind, given, meant",
    [
        ("optimizer", "AdamW", "learning_rate", "lr"),
        ("optimizer", "SGD", "Learning-Rate", "lr"),
        ("optimizer", "Adam", "epsilon", "eps"),
        ("optimizer", "Adam", "beta1", "betas"),
        ("optimizer", "SGD", "wd", "weight_decay"),
        ("scheduler", "WarmupLR", "warmup_steps", "warmup_num_steps"),
        ("scheduler", "WarmupDecayLR", "num_warmup_steps", "warmup_num_steps"),
        ("scheduler", "WarmupDecayLR", "max_steps", "total_num_steps"),
        ("scheduler", "WarmupCosineLR", "num_training_steps", "total_num_steps"),
        # A fraction of the steps, which is not what its nearest name, warmup_min_ratio, is.
        ("scheduler", "WarmupCosineLR", "warmup_ratio", "warmup_num_steps"),
        ("scheduler", "WarmupLR", "learning_rate", "warmup_max_lr"),
        ("scheduler", "OneCycle", "max_lr", "cycle_max_lr"),
    ],
)
def test_names_of_other_libraries_are_known(section: str, kind: str, given: str, meant: str) -> None:
    said = refusal(**{section: {"type": kind, "params": {given: 1}}})
    assert f'{section}.params.{given} = 1: "{given}" is not a key of' in said
    assert f'did you mean "{meant}"?' in said


def test_all_problems_at_once() -> None:
    file = json.loads(USERS_BLOCK)
    file["zero_optimization"]["offload_optimizer"]["devise"] = "cpu"
    file["zero_optimization"] |= {"stage": 4, "reduce_bucket_size": "5e8 or so", "zenflow": {"topk_ratio": 0.1}}
    file["optimizer"]["type"] = "LAMB"
    file["scheduler"] = {"type": "WarmupDecayLR", "params": {}}
    file["fp16"]["enabled"] = file["bf16"]["enabled"] = True
    file |= {"train_batch_size": 7, "elasticity": {"enabled": True}, "wall_clock_breakdown": 2}
    file |= {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
    with pytest.raises(ConfigError) as caught:
        load_config(file, world_size=2)
    found = {problem.path: problem for problem in caught.value.problems}
    assert {*found} == {
        "zero_optimization.offload_optimizer.devise",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.zenflow",
        "optimizer.type",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "train_batch_size",
        "elasticity",
        "wall_clock_breakdown",
        "(together)",
    }
    assert found["zero_optimization.reduce_bucket_size"].value == "5e8 or so"
    for line in (
        'devise = "cpu": "devise" is not a key of zero_optimization.offload_optimizer; did you mean "device"?',
        "zero_optimization.stage = 4: must be one of 0, 1, 2",
        'zero_optimization.reduce_bucket_size = "5e8 or so": must be an integer of at least 1',
        'optimizer.type = "LAMB": is not supported: it looks at shapes or norms of whole parameters',
        "scheduler.params.total_num_steps: is missing",
        "fp16.enabled = true: excludes bf16.enabled, which is true too; leave one of them true",
        "change train_batch_size to 6 or 8",
        "gradient_predivide_factor 2 would do nothing",
    ):
        assert line in str(caught.value)
    assert str(caught.value).startswith("config has 11 problems:\n")


@pytest.mark.parametrize(
    "file, where, what",
    [
        ({"fp16": {"stage": 2}}, "fp16.stage", "not a key of fp16, but of zero_optimization; move it there"),
        ({"offload_optimizer": {}}, "offload_optimizer", "not a key of the file's top level, but of zero_opt"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}}, "params.betas", "AdamW and Adam and Lion"),
        ({"wobble": 1}, "wobble", "nor of any other section; remove it"),
        ({"opt_level": "O1"}, "opt_level", "it is apex's, which longshore does not use: enable bf16, fp16"),
        ({"fp16": {"opt_level": "O1"}}, "fp16.opt_level", "it is apex's, which longshore does not use"),
        ({"zero_optimization": {"_comment": "x"}}, "_comment", "and DeepSpeed refuses it there too; move the comment"),
        ({"_gradient_clipping": 1}, "_gradient_clipping", 'did you mean "gradient_clipping"?'),
        ({"notes": 1}, "notes", "nor of any other section; remove it"),  # not "others"
        ({"opt_name": 1}, "opt_name", "nor of any other section; remove it"),  # not "job_name"
        ({"fp16": {"fp16": True}}, "fp16.fp16", "is not a key of fp16, but of the top level; move it there"),
        ({"tensorboard_dir": "x"}, "tensorboard_dir", 'did you mean "tensorboard"?'),
        ({"optim": {}}, "optim", 'did you mean "optimizer"?'),
        ({"wandb_project": "x"}, "wandb_project", 'did you mean "wandb.project"'),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_quantized_weights",
            "is not supported: true gathers parameters as 8-bit integers, and the model computes with other weights",
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_quantized_gradients",
            "is not supported: true exchanges gradients as 4-bit integers, and steps have other gradients",
        ),
        (
            {"zero_optimization": {"super_offload": True}},  # "cpu_offload" is near
            "super_offload",
            "not a key of zero_optimization, but of zero_optimization.offload_optimizer; move it there",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"speculation_memory": "auto"}}},  # "pin_memory" is near
            "speculation_memory",
            "but of longshore; move it there",
        ),
        (
            {"torch_autocast": {"type": "bf16"}},
            "type",
            'but of optimizer and scheduler; move it there, or did you mean "dtype"?',
        ),
        (
            {"zero_optimization": {"stage": 2}, "longshore": {"wrap_policy": ["Block"]}},
            "longshore.wrap_policy",
            "must agree with zero_optimization.stage, which is 2: it is for stage 3; leave it out",
        ),
        ({"grad_clipping": 1}, "grad_clipping", 'did you mean "gradient_clipping"?'),
        ({"learning_rate": 1e-4}, "learning_rate", 'did you mean "optimizer.params.lr"?'),
        ({"bf16": {"los_scale": 1}}, "bf16.los_scale", 'did you mean "fp16.loss_scale"'),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device", "NVMe"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpux"}}}, "device", 'did you mean "cpu"?'),
        ({"optimizer": {"type": "OneBitAdam", "params": {"x": 1}}}, "optimizer.type", "use AdamW"),
        ({"optimizer": {"type": "LBFGS"}}, "optimizer.type", "several times a step"),
        ({"optimizer": {"type": "Adamm"}}, "optimizer.type", 'did you mean "AdamW" or "Adam"'),
        ({"optimizer": {"type": "RAdam"}}, "optimizer.type", "initialize(optimizer=...)"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", "is missing"),
        ({"optimizer": "AdamW"}, "optimizer", "must be a section"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params", "must be a section"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas", "a list of 2"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr", "at least 0"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "max_grad_norm", "set gradient_clipping"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params:", "needs a momentum"),
        ({"scheduler": {"type": "StepLR"}}, "scheduler.type", "initialize(lr_scheduler=...)"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_ln": 1}}},
            "scheduler.params.warmup_max_ln",
            'did you mean "warmup_max_lr"?',
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}},
            "scheduler.params: total_num_steps 10",
            "below warmup_num_steps, which is 1000",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype", "is missing"),
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, "torch_autocast.dtype", 'one of "bf16", "fp16"'),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "bf16.enabled", "excludes torch_autocast"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "fp16", "above the first scale"),
        ({"gradient_clipping": None}, "gradient_clipping = null", "write 0 for no clipping"),
        ({"gradient_clipping": -1.0}, "gradient_clipping", "at least 0"),
        ({"zero_optimization": 2}, "zero_optimization", "must be a section"),
        ({"communication_data_type": "fp8"}, "communication_data_type", '"fp32", "bf16", "fp16"'),
        ({"train_batch_size": 0}, "train_batch_size", "at least 1"),
        ({"train_batch_size": True}, "train_batch_size", "an integer"),
        ({"zero_optimization": {"overlap_comm": 2}}, "zero_optimization.overlap_comm", "true or false"),
        ({1: 2}, "1", "keys are strings"),
        ({"optimizer.params": {"lr": 1}}, "optimizer.params", 'write "params" inside "optimizer"'),
        ({"zero_optimization.stage": 1}, "zero_optimization.stage", 'write "stage" inside "zero_optimization"'),
        ({"elasticity": {"enabled": 2}}, "elasticity", "is not supported"),
        ({"gradient_clipping": 10**400}, "gradient_clipping", "must be a number"),
        ({"aip": 1}, "aip", 'did you mean "aio" or "amp"?'),
        ({"gradient_accumulation_steps": 3}, "train_batch_size", "is not a multiple of gradient_accumulation_steps 3"),
        (  # one problem, not also one that the key is missing
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
            "is left for another program to fill in",
        ),
    ],
)  # fmt: skip
def test_one_problem(file: dict[Any, Any], where: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8, "gradient_clipping": 1.0, **file})
    (problem,) = caught.value.problems
    assert where in str(problem)
    assert what in problem.what


def test_values_that_switch_a_refused_key_off() -> None:
    loaded = load(
        elasticity={"enabled": False, "max_train_batch_size": 2000},
        amp={"enabled": False},
        autotuning=None,
        tensorboard={"enabled": False, "job_name": "x"},
        tensor_parallel={"autotp_size": 1},
        compile={"deepcompile": False, "debug_log": False},
        weight_quantization={"enabled": False},
        sparse_attention={},
        sparse_gradients=False,
        gradient_allreduce_op="MEAN",
        zero_optimization={"offload_param": {"device": "none"}, "zenflow": None, "offload_optimizer": {"ratio": 1}},
    )
    assert loaded == load()
    for file in (
        {"elasticity": {"enabled": True}},
        {"amp": True},
        {"tensor_parallel": {"autotp_size": 2}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 2}}},
        {"compile": {"deepcompile": True}},
        {"weight_quantization": {"post_init_quant": {}}},
        {"sparse_attention": {"mode": "fixed"}},
        {"gradient_allreduce_op": "sum"},
        {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
        {"zero_optimization": {"cpu_offload": False, "zero_quantized_weights": True}},
    ):
        assert "is not supported" in refusal(**file), file


def offload_param(**others: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, **others}
    return {"zero_optimization": zero}


def test_parameters_on_the_host() -> None:
    keys = {"device": "cpu", "pin_memory": False, "buffer_count": 5, "buffer_size": 100, "max_in_cpu": 0}
    loaded = load(**offload_param(offload_param=keys))
    assert loaded.config.param_device == "cpu" and loaded == load(**offload_param())
    assert load(**offload_param(offload_param={"device": "none"})).config.param_device == "none"
    assert load(zero_optimization={"stage": 3}).config.param_device == "none"
    for states in ({"offload_optimizer": {"device": "none"}}, {"offload_optimizer": None}):
        stepped_there = load(**offload_param(**states))
        assert stepped_there.config == loaded.config
        (note,) = stepped_there.notes
        assert "is stepped there, since the parameters are there" in note
    path = "zero_optimization.offload_param.device"
    for file, other in (
        (offload_param(stage=2), "zero_optimization.stage, which is 2: parameters in host memory need 3"),
        (offload_param(offload_optimizer={"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio, which is 0.5"),
        (
            {**offload_param(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "torch_autocast.enabled, which is True",
        ),
    ):
        refused = refusal(**file)
        assert path in refused and other in refused, refused
    assert "are not kept by longshore" in refusal(**offload_param(offload_param={"device": "nvme"}))
    for field, value in (("stage", 2), ("offload_device", "none"), ("offload_ratio", 0.5), ("autocast", "bf16")):
        settings: dict[str, Any] = {"stage": 3, "offload_device": "cpu", "param_device": "cpu", field: value}
        with pytest.raises(ConfigError, match=f"needs {field} |offload_ratio 0.5"):
            Config(**settings)


def test_clipping() -> None:
    assert load(gradient_clipping=0.0).config.gradient_clipping is None
    assert load(gradient_clipping=0.3).config.gradient_clipping == 0.3
    assert load(gradient_clipping=0.3).notes == ()
    absent = load_config({"train_batch_size": 8})
    assert absent.config.gradient_clipping == 1.0
    assert len(absent.notes) == 1 and "set it to 0 for no clipping" in absent.notes[0]


def test_buckets_as_floats_and_unknown_to_auto() -> None:
    config = load(zero_optimization={"reduce_bucket_size": 2e8, "allgather_bucket_size": "auto"}).config
    assert (config.reduce_bucket_numel, type(config.reduce_bucket_numel)) == (200_000_000, int)
    assert config.allgather_bucket_numel == 500_000_000
    assert "reduce_bucket_size = 0.5: must be an integer" in refusal(zero_optimization={"reduce_bucket_size": 0.5})


def test_auto() -> None:
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto", "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    unresolved = {problem.path for problem in caught.value.problems if problem.value == "auto"}
    assert unresolved == {"gradient_clipping", "bf16.enabled", "optimizer.params.lr", "optimizer.params.betas"}
    assert 'train_batch_size: is "auto", and not filled in' in str(caught.value)
    auto = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16.enabled": True,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.betas": (0.8, 0.9),
        "zero_optimization.reduce_bucket_size": 1000,
        "fp16.enabled": True,  # the file does not ask for it
    }
    before = copy.deepcopy(file)
    config, notes = load_config(file, auto=auto, world_size=4)
    assert file == before and notes == ()
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (8, 2, 1)
    assert (config.dtype, config.gradient_clipping, config.reduce_bucket_numel) == ("bf16", 0.5, 1000)
    assert config.optimizer == AdamWConfig(lr=1e-4, betas=(0.8, 0.9), weight_decay=0.0)
    with pytest.raises(ConfigError, match=r'auto\[.*"learning_rate" is not a key'):
        load_config(file, auto={**auto, "learning_rate": 1})
    with pytest.raises(ConfigError, match="must be a number of at least 0"):
        load_config(file, auto={**auto, "optimizer.params.lr": "fast"})


def test_old_names() -> None:
    loaded = load(
        zero_optimization={"stage": 1, "cpu_offload": True},
        fp32_allreduce=True,
        allgather_size=100,
        bfloat16={"enabled": True, "check_overflow": True},
    )
    config = loaded.config
    assert (config.stage, config.offload_device, config.dtype) == (1, "cpu", "bf16")
    assert (config.communication_dtype, config.allgather_bucket_numel) == ("fp32", 100)
    assert config.loss_scaling == LossScaling(scale=1.0)
    assert len(loaded.notes) == 5 and all("old name" in note for note in loaded.notes)
    assert load(zero_optimization=True).config.stage == 1
    assert load(zero_optimization=False).config.stage == 0
    assert "read as stage 1" in load(zero_optimization=True).notes[0]
    assert load(zero_optimization={"cpu_offload": False}).config.offload_device == "none"
    parameters_too = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    assert load(zero_optimization=parameters_too).config.param_device == "cpu"
    both = {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert "is given too" in refusal(zero_optimization=both)
    assert "is given too" in refusal(bf16={"enabled": True}, bfloat16={"enabled": True})


@pytest.mark.parametrize("named", ["fp32", "float32", "FP32", "torch.float32", torch.float32])
def test_dtypes_by_any_name(named: object) -> None:
    assert load(communication_data_type=named).config.communication_dtype == "fp32"


def test_param_dtype_agrees() -> None:
    assert load(bf16={"enabled": True}, data_types={"param_dtype": "bfloat16"}).config.dtype == "bf16"
    assert load(data_types={"param_dtype": "fp32"}).config.dtype is None
    assert "parameters are fp32" in refusal(data_types={"param_dtype": "bf16"})


def test_precision() -> None:
    assert load().config.dtype is None and load().config.accumulation_dtype == "fp32"
    assert load(data_types={"grad_accum_dtype": "bf16"}).config.accumulation_dtype == "bf16"
    bf16, notes = load(bf16={"enabled": True})
    assert (bf16.dtype, bf16.loss_scaling) == ("bf16", None) and "check_grad_overflow" in notes[0]
    assert load(bf16={"enabled": True, "check_grad_overflow": False}).notes == ()
    fp16 = load(fp16={"enabled": True}).config
    assert (fp16.dtype, fp16.loss_scaling, fp16.cast_inputs) == ("fp16", LossScaling(), False)
    settings = {"enabled": True, "auto_cast": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 7,
                "hysteresis": 3, "consecutive_hysteresis": True, "min_loss_scale": 4}  # fmt: skip
    fp16 = load(fp16=settings).config
    assert fp16.cast_inputs
    assert fp16.loss_scaling == LossScaling(
        initial_scale_power=8, window=7, hysteresis=3, consecutive_hysteresis=True, min_scale=4.0
    )
    assert load(fp16={**settings, "loss_scale": 128}).config.loss_scaling == LossScaling(scale=128.0)
    assert load(fp16={**settings, "enabled": False}) == load()
    autocast = load(torch_autocast={"enabled": True, "dtype": "bfloat16"}).config
    assert (autocast.autocast, autocast.dtype, autocast.loss_scaling) == ("bf16", None, None)
    autocast = load(torch_autocast={"enabled": True, "dtype": "float16"}).config
    assert autocast.loss_scaling == LossScaling(window=2000, hysteresis=1)
    assert load(torch_autocast={"enabled": False}) == load()


def optimizer(kind: str, **params: Any) -> Any:
    return load(optimizer={"type": kind, "params": params}).config.optimizer


def test_adam_w_mode() -> None:
    assert optimizer("Adam", weight_decay=0.1) == AdamWConfig(weight_decay=0.1)
    assert optimizer("Adam", weight_decay=0.1, adam_w_mode=False) == AdamConfig(weight_decay=0.1)
    assert optimizer("ADAMW", adam_w_mode=False) == AdamWConfig(weight_decay=0.0)
    (note,) = load(optimizer={"type": "Adam", "params": {"weight_decay": 0.1}}).notes
    assert "means AdamW" in note
    assert load(optimizer={"type": "Adam"}).notes == ()  # without weight decay they are the same


def test_torch_adam() -> None:
    assert optimizer("AdamW").weight_decay == 0.0
    assert optimizer("AdamW", torch_adam=True).weight_decay == 0.01
    assert optimizer("AdamW", torch_adam=True, fused=True, weight_decay=0.2) == AdamWConfig(weight_decay=0.2)


def test_optimizers_by_name() -> None:
    assert optimizer("AdamW", bias_correction=False).arguments()["bias_correction"] is False
    assert optimizer("lion").arguments() == {
        "lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "maximize": False
    }  # fmt: skip
    assert optimizer("Adagrad", lr_decay=0.1).arguments() == {
        "lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.0, "maximize": False
    }  # fmt: skip
    assert optimizer("sgd", momentum=0.9, nesterov=True) == SGDConfig(momentum=0.9, nesterov=True)


def test_schedulers_by_name() -> None:
    def scheduler(kind: str, **params: Any) -> Any:
        return load(scheduler={"type": kind, "params": params}).config.scheduler

    assert scheduler("warmuplr", warmup_max_lr=[1e-3, 2e-3]) == WarmupLRConfig(warmup_max_lr=(1e-3, 2e-3))
    decay = scheduler("WarmupDecayLR", total_num_steps=1e4, warmup_num_steps=10, warmup_type="LINEAR")
    assert decay == WarmupDecayLRConfig(total_num_steps=10_000, warmup_num_steps=10, warmup_type="linear")
    assert scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, last_batch_iteration=-1) == OneCycleConfig(
        cycle_min_lr=0.1, cycle_max_lr=0.2
    )
    assert scheduler("LRRangeTest").type == "LRRangeTest"
    assert "would never decay" in refusal(
        scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": 0.1}}
    )


def test_what_is_ours_in_a_file() -> None:
    config = load(longshore={"tile_numel": 1024, "threads": 2, "cpu_set": [0, 1]}).config
    assert (config.tile_numel, config.threads, config.cpu_set) == (1024, 2, (0, 1))


def test_our_own_config_is_taken_as_it_is() -> None:
    config = Config(train_batch_size=8)
    assert load_config(config) == (config, ())
    assert load_config(config, world_size=4).config.micro_batch_size == 2
    with pytest.raises(TypeError, match=r"a path, a dict or a longshore\.Config, not int"):
        load_config(3)  # type: ignore[arg-type]
    for given in (config, {"train_batch_size": 8}):
        with pytest.raises(ValueError, match=r"^world_size is a number of ranks, at least 1, not 0"):
            load_config(given, world_size=0)


@pytest.mark.parametrize("numbers", [{}, {"gradient_accumulation_steps": 2}])
def test_a_file_says_a_batch_size(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is missing, and so is train_micro_batch_size_per_gpu"):
        load_config({"gradient_clipping": 1.0, **numbers})


@pytest.mark.parametrize("value", [3.5, ["info"]])
def test_what_the_key_log_may_be_is_said_once(value: Any) -> None:
    file = {**json.loads(USERS_BLOCK), "log": value}
    with pytest.raises(ConfigError, match=r"must be true or false, or a string, or a section \(an object\)$"):
        load_config(file)


@pytest.mark.parametrize("name", ["_comment", "__comment__", "comment", "//", "// stage", "#", "_read_the_docs"])
def test_comments_are_read_over_where_deepspeed_reads_over_them(name: str) -> None:
    file = json.loads(USERS_BLOCK)
    without = load_config(file)
    file |= {name: "a person's", "log": {"level": "info"}}
    file["optimizer"][name] = {"more": 1}
    file["flops_profiler"] = {"enabled": False, name: None}
    config, notes = load_config(file)
    assert config == without.config
    (told,) = [note for note in notes if "comment" in note]
    assert (
        told
        == f"optimizer.{name}, {name}, flops_profiler.{name}: read as a comment, and ignored, as DeepSpeed ignores it"
    )
    file["optimizer"]["params"] = {name: 1}
    with pytest.raises(ConfigError, match=re.escape(f'optimizer.params.{name} = 1: "{name}" is not a key of')):
        load_config(file)


def test_quantized_communication_may_be_switched_off() -> None:
    names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    file = json.loads(USERS_BLOCK)
    without = load_config(file).config
    file["zero_optimization"] |= dict.fromkeys(names, False)
    assert load_config(file).config == without


def test_the_flops_profilers_settings() -> None:
    file = json.loads(USERS_BLOCK)
    section = {"profile_step": 0, "module_depth": 2, "top_modules": 0, "detailed": False, "output_file": "a.txt"}
    file["flops_profiler"] = {"enabled": True, "recompute_fwd_factor": 0.0, **section}
    found = load_config(file).config.flops_profiler
    assert found is not None and found.model_dump() == section
    file["flops_profiler"] = {"enabled": True, "output_file": None}
    found = load_config(file).config.flops_profiler
    assert found is not None and found.model_dump() == FlopsProfilerConfig().model_dump()
    file["flops_profiler"] = {"enabled": False, **section}
    assert load_config(file).config.flops_profiler is None
