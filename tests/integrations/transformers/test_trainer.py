"""longshore's Trainer: transformers' arguments, logs, callbacks and checkpoints on the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import Ranks

import longshore
from integrations.transformers import cases
from integrations.transformers.cases import check_equal, close, stage, train
from longshore.integrations.transformers import Trainer, TrainerMixin


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "options",
    [
        {},  # the last window of the epoch is shorter than the others
        {"bf16": True},
        {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"lr_scheduler_type": "cosine", "optim": "sgd", "max_steps": 5, "max_grad_norm": float("inf")},
        {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "num_train_epochs": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_rank(options: dict[str, Any], tmp_path: Path) -> None:
    """The weights, losses and learning rates of the plain Trainer, by the same arguments."""
    plain = train(transformers.Trainer, tmp_path / "plain", **options)
    mine = train(Trainer, tmp_path / "ours", **options)
    check_equal(mine.weights, plain.weights)
    assert [log.get("loss") for log in mine.logs] == [log.get("loss") for log in plain.logs]
    assert [log.get("eval_loss") for log in mine.logs] == [log.get("eval_loss") for log in plain.logs]
    assert [log.get("learning_rate") for log in mine.logs] == [log.get("learning_rate") for log in plain.logs]
    close(mine)


def test_parameters_that_rest_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting reaches the engine, and it is left to the engine to move the model, for which no device has room."""
    moved: list[Any] = []
    move = transformers.Trainer._move_model_to_device
    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", lambda *each: [moved.append(each), move(*each)])
    plain = train(transformers.Trainer, tmp_path / "plain")
    assert moved
    moved.clear()
    config = stage(3)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    mine = train(Trainer, tmp_path / "ours", {"config": config}, **options)
    assert mine.trainer.engine.config.param_device == "cpu" and not moved
    check_equal(mine.weights, plain.weights)
    close(mine)


@pytest.mark.medium
@pytest.mark.parametrize(
    "number, accumulation",
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.needs_torch("stage 3")),
    ],
)
def test_two_ranks(number: int, accumulation: int, two_ranks: Ranks, tmp_path: Path) -> None:
    """The plain Trainer's weights under DDP, which sums a window's gradients on each rank, as stage 1 does."""
    two_ranks(cases.same_as_ddp, str(tmp_path), number, accumulation)


@pytest.mark.needs_torch("stage 3")
def test_smoothed_labels_at_stage_3(two_ranks: Ranks, tmp_path: Path) -> None:
    """The Trainer knows from the name of the model's class that labels are shifted, and FSDP2 changes that name."""
    two_ranks(cases.same_as_ddp, str(tmp_path), 3, 1, label_smoothing_factor=0.1, max_steps=2)


@pytest.mark.slow
def test_generates_at_stage_3(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.generated, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_resumes(number: int, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.resumed, str(tmp_path), number)


def test_bf16_from_the_file(tmp_path: Path) -> None:
    """``"auto"``: bfloat16 parameters with float32 masters, as the file's readers know it; not autocast."""
    mine = train(
        Trainer, tmp_path, {"config": stage(1, bf16={"enabled": "auto", "check_grad_overflow": False})}, bf16=True
    )
    assert {each.dtype for each in mine.weights.values()} == {torch.bfloat16}
    assert mine.trainer.engine.config.autocast is None
    close(mine)


def test_overflow_skips_the_schedule_too(tmp_path: Path) -> None:
    """fp16 with a scale that overflows at first: neither weights nor the learning rate move."""
    fp16 = {"enabled": "auto", "initial_scale_power": 32, "hysteresis": 1}
    mine = train(
        Trainer, tmp_path, {"config": stage(1, fp16=fp16)}, fp16=True, warmup_steps=0, max_steps=4, num_train_epochs=1
    )
    engine = mine.trainer.engine
    assert engine.skipped_steps == 4 and mine.trainer.state.global_step == 4
    assert [log["learning_rate"] for log in mine.logs if "learning_rate" in log] == [1e-2] * 4
    check_equal(mine.weights, {name: each.half() for name, each in cases.make_model().named_parameters()})
    close(mine)


def test_the_norm_is_the_step_before_clipping(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(trainer.engine.get_global_grad_norm())

    with cases.fresh_accelerate():
        trainer = Trainer(
            cases.make_model(),
            cases.arguments(tmp_path, max_grad_norm=0.25),
            train_dataset=cases.make_data(),
            callbacks=[Watch()],
            config=stage(2, gradient_clipping="auto"),
        )
        trainer.train()
    logged = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert logged == seen and min(seen) > 0.25
    trainer.engine.destroy()


@pytest.mark.parametrize(
    "before, after, says",
    [
        (
            1.0,
            0.0,
            "are to be clipped to nothing, and the engine was made with gradient_clipping=1.0; set max_grad",
        ),
        (1.0, 0.5, "are to be clipped to 0.5, and the engine was made with gradient_clipping=1.0"),
        (0.0, 0.5, "are to be clipped to 0.5, and the engine was made with gradient_clipping=None"),
    ],
)
def test_clipping_that_changes(before: float, after: float, says: str, tmp_path: Path) -> None:
    class Change(transformers.TrainerCallback):
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            args.max_grad_norm = after

    with pytest.raises(ValueError, match=says):
        train(Trainer, tmp_path, {"callbacks": [Change()]}, max_grad_norm=before)


def test_the_files_optimizer_and_schedule(tmp_path: Path) -> None:
    """What is "auto" or left out is the arguments'; biases and norms are not decayed, as the Trainer has it.

    The schedules of DeepSpeed's files begin one step later than transformers' of the same shape.
    """
    config = stage(
        2,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    )
    plain = train(transformers.Trainer, tmp_path / "plain", lr_scheduler_type="linear")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    with cases.fresh_accelerate(), pytest.raises(longshore.ConfigError, match=r"ds\.json has 1 problem"):
        Trainer(cases.make_model(), cases.arguments(tmp_path), config=tmp_path / "no" / "ds.json")
    mine = train(Trainer, tmp_path / "ours", {"config": str(file)})
    assert [group["weight_decay"] for group in mine.trainer.engine.optimizer.param_groups] == [0.1, 0.0]
    rates = [[log["learning_rate"] for log in run.logs if "learning_rate" in log] for run in (mine, plain)]
    assert len(rates[0]) == 7 and rates[0][1:] == pytest.approx(rates[1][:-1])
    close(mine)


@pytest.mark.needs_torch("torch.optim.Muon")
def test_muon_of_a_file(tmp_path: Path) -> None:
    """The arguments fill it in, and the Trainer's groups, of which one does not decay, are divided."""
    model = cases.make_model()
    same = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = longshore.Muon(longshore.muon_groups(model, muon=same, adamw=same, show=False))
    plain = train(transformers.Trainer, tmp_path / "plain", {"optimizers": (optimizer, None)}, model)
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "ns_method": "standard"}
    config = stage(2, optimizer={"type": "Muon", "params": params})
    mine = train(Trainer, tmp_path / "ours", {"config": config})
    check_equal(mine.weights, plain.weights)
    rates = [[log["learning_rate"] for log in run.logs if "learning_rate" in log] for run in (mine, plain)]
    assert rates[0] == rates[1]
    close(mine)


@pytest.mark.parametrize(
    "config, options, says",
    [
        (
            stage(2, train_micro_batch_size_per_gpu=4, gradient_clipping=2.0),
            {"max_grad_norm": 1.0},
            [
                "train_micro_batch_size_per_gpu = 4: contradicts TrainingArguments(per_device_train_batch_size=2)",
                "gradient_clipping = 2.0: contradicts TrainingArguments(max_grad_norm=1.0)",
            ],
        ),
        (
            stage(2, train_batch_size=3),
            {},
            ["train_batch_size = 3: contradicts TrainingArguments(per_device_train", "_steps=2) x 1 rank(s) = 4"],
        ),
        (
            stage(2, optimizer={"type": "AdamW", "params": {"lr": 1e-5}}),
            {},
            ["optimizer.params.lr = 1e-05: contradicts TrainingArguments(learning_rate=0.01)"],
        ),
        (
            stage(2, bf16={"enabled": True}),
            {},
            ["bf16.enabled = true: contradicts TrainingArguments(bf16=False, fp16="],
        ),
        (
            stage(2, bf16={"enabled": False}),
            {"bf16": True},
            ["bf16.enabled = false: contradicts TrainingArguments(bf16=T"],
        ),
        (stage(2, zero_optimisation={}), {}, ["zero_optimisation"]),
        (
            longshore.Config(stage=2, micro_batch_size=8, gradient_clipping=1.0, autocast="bf16"),
            {},
            [
                "micro_batch_size = 8: contradicts TrainingArguments(per_device_train_batch_size=2)",
                "gradient_clipping = 1.0: contradicts TrainingArguments(max_grad_norm=0",
                'autocast = "bf16": contradicts TrainingArguments(bf16=False',
            ],
        ),
    ],
)
def test_contradictions(config: Any, options: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    """All of them at once, both values, before anything is trained or moved."""
    with cases.fresh_accelerate(), pytest.raises(longshore.ConfigError) as raised:
        Trainer(cases.make_model(), cases.arguments(tmp_path, **options), config=config)
    assert all(each in str(raised.value) for each in says), str(raised.value)


def test_a_config_of_ours(tmp_path: Path) -> None:
    from longshore.engine.config import AdamWConfig, WarmupLRConfig

    config = longshore.Config(
        stage=1,
        optimizer=AdamWConfig(eps=1e-6),
        scheduler=WarmupLRConfig(warmup_num_steps=3, warmup_type="linear"),
        threads=1,
    )
    mine = train(Trainer, tmp_path, {"config": config}, adam_epsilon=1e-6, max_grad_norm=1.0)
    made = mine.trainer.engine
    assert made.optimizer.defaults["lr"] == 1e-2 and made.optimizer.defaults["eps"] == 1e-6
    assert made.config.gradient_clipping == 1.0 and made.train_batch_size() == 4
    assert mine.logs[2]["learning_rate"] == pytest.approx(1e-2 / 3)
    close(mine)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*set per_device_train_batch_size"),
        ({"bf16_full_eval": True}, "evaluate a copy"),
    ],
)
def test_refused_arguments(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with cases.fresh_accelerate(), pytest.raises(ValueError, match=says):
        Trainer(cases.make_model(), cases.arguments(tmp_path, **options))


def test_a_best_model_without_the_engines_part(two_ranks: Ranks, tmp_path: Path) -> None:
    steps = {"eval_strategy": "steps", "save_strategy": "steps"}
    options = {"load_best_model_at_end": True, "save_only_model": True, **steps}
    two_ranks(cases.refused, str(tmp_path), "loads what the engine saved.*leave out one", **options)


def test_two_optimizers_are_one_too_many(tmp_path: Path) -> None:
    config = stage(1, optimizer={"type": "AdamW", "params": {}})
    with pytest.raises(ValueError, match="an optimizer is given twice"):
        train(Trainer, tmp_path, {"config": config, "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2})})


def test_an_optimizer_and_a_schedule_of_the_users(tmp_path: Path) -> None:
    def given() -> tuple[Any, dict[str, Any]]:
        model = cases.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return model, {"optimizers": (optimizer, schedule)}

    model, extra = given()
    plain = train(transformers.Trainer, tmp_path / "plain", extra, model)
    model, extra = given()
    mine = train(Trainer, tmp_path / "ours", extra, model)
    check_equal(mine.weights, plain.weights)
    assert mine.logs[3]["learning_rate"] == plain.logs[3]["learning_rate"] < 1e-2
    close(mine)


@pytest.mark.medium
def test_train_again_and_model_init(tmp_path: Path) -> None:
    """A second train() goes on with the engine; with model_init it begins anew, on an engine of its own."""
    with cases.fresh_accelerate():
        data = cases.make_data()
        plain = transformers.Trainer(cases.make_model(), cases.arguments(tmp_path / "p"), train_dataset=data)
        mine = Trainer(cases.make_model(), cases.arguments(tmp_path / "o"), train_dataset=data)
        before = mine.evaluate(cases.make_data(4))["eval_loss"]
        for trainer in (plain, mine):
            trainer.train()
            trainer.train()
        check_equal(dict(mine.model.named_parameters()), dict(plain.model.named_parameters()))
        assert (
            mine.evaluate(cases.make_data(4))["eval_loss"] == plain.evaluate(cases.make_data(4))["eval_loss"] != before
        )
        mine.engine.destroy()
        anew = Trainer(None, cases.arguments(tmp_path / "a"), train_dataset=data, model_init=lambda: cases.make_model())
        anew.train()
        first, weights = anew.engine, {name: each.clone() for name, each in anew.model.named_parameters()}
        anew.train()
        assert anew.engine is not first
        check_equal(dict(anew.model.named_parameters()), weights)
        anew.engine.destroy()


def test_the_best_model_at_the_end(tmp_path: Path) -> None:
    """These data cannot be learned, so that the first evaluation is the best."""
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "max_steps": 6,
        "save_total_limit": 2,
    }
    plain = train(transformers.Trainer, tmp_path / "plain", **options)
    mine = train(Trainer, tmp_path / "ours", **options)
    assert mine.trainer.state.best_global_step == plain.trainer.state.best_global_step < 6
    check_equal(mine.weights, plain.weights)
    close(mine)


class _InAccumulation(transformers.TrainerCallback):
    """Sets ``wishes`` of the control after one of the two backwards of the fifth step."""

    def __init__(self, *wishes: str) -> None:
        self._wishes = wishes

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            for wish in self._wishes:
                setattr(control, wish, True)


@pytest.mark.quick(0)
@pytest.mark.parametrize("wishes", [["should_training_stop"], ["should_training_stop", "should_save"]])
def test_training_that_stops_in_accumulation(wishes: list[str], tmp_path: Path) -> None:
    """What is left of the window is nobody's: the last checkpoint is saved, and the best one loaded."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    options["load_best_model_at_end"] = True
    plain = train(transformers.Trainer, tmp_path / "plain", {"callbacks": [_InAccumulation(*wishes)]}, **options)
    mine = train(Trainer, tmp_path / "ours", {"callbacks": [_InAccumulation(*wishes)]}, **options)
    check_equal(mine.weights, plain.weights)
    close(mine)


def test_a_checkpoint_in_accumulation(tmp_path: Path) -> None:
    given = {"callbacks": [_InAccumulation("should_epoch_stop", "should_save")]}
    with pytest.raises(longshore.errors.CheckpointError, match=r"after step 4 in .* accumulation.*on_step_end"):
        train(Trainer, tmp_path, given)
    assert not (tmp_path / "checkpoint-4").exists()


def test_goes_on_from_a_plain_trainers_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    plain = train(transformers.Trainer, tmp_path, **options)
    mine = train(Trainer, tmp_path, resume=str(tmp_path / "checkpoint-6"), num_train_epochs=2)
    check_equal(mine.weights, plain.weights)
    close(mine)
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(longshore.errors.CheckpointError, match=r"neither a checkpoint of longshore nor optimizer\.pt"):
        train(Trainer, tmp_path, resume=str(tmp_path / "checkpoint-6"), num_train_epochs=2)
    with pytest.raises(ValueError, match="has no complete checkpoint to resume from"):
        train(Trainer, tmp_path / "nothing", resume=True)


def test_adapters(tmp_path: Path) -> None:
    """A PEFT model: the adapter is trained, saved alone, and resumed."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    torch.manual_seed(0)
    plain = train(transformers.Trainer, tmp_path / "plain", model=cases.make_adapted(), **options)
    torch.manual_seed(0)
    mine = train(Trainer, tmp_path / "ours", model=cases.make_adapted(), **options)
    check_equal(mine.weights, plain.weights)
    assert all("lora" in name for name in mine.weights) and mine.weights
    saved = tmp_path / "ours" / "checkpoint-3"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    torch.manual_seed(1)
    again = train(Trainer, tmp_path / "ours", model=cases.make_adapted(), resume=str(saved), num_train_epochs=1)
    check_equal(again.weights, plain.weights)
    close(mine, again)


@pytest.mark.medium
def test_trl(tmp_path: Path) -> None:
    """TRL's trainers compose with the mixin."""
    import trl

    class Sft(TrainerMixin, trl.SFTTrainer):
        pass

    texts, tokenizer = cases.make_texts()

    def run(kind: Any, folder: str) -> Any:
        with cases.fresh_accelerate():
            args = trl.SFTConfig(
                str(tmp_path / folder),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=4,
                learning_rate=1e-2,
                max_grad_norm=0.0,
                optim="adamw_torch_fused",
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                max_length=16,
            )
            trainer = kind(cases.make_model(), args, train_dataset=texts, processing_class=tokenizer)
            trainer.train()
        return trainer

    plain, mine = run(trl.SFTTrainer, "plain"), run(Sft, "ours")
    check_equal(dict(mine.model.named_parameters()), dict(plain.model.named_parameters()))
    mine.engine.destroy()
