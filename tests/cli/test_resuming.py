"""``--resume``: a run that was stopped, or killed, ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import MICRO_MODEL, MICRO_RUN
from cli.rank_cases import command
from pydantic_core import to_jsonable_python

from longshore.cli import output
from longshore.cli.loop import Loop
from longshore.cli.options import option_fields
from longshore.cli.resuming import _ENGINE, _decisive
from longshore.cli.settings import TrainSettings
from longshore.engine.config import Config
from longshore.engine.config.model import BETWEEN_RANKS, OF_EACH_RANK

ENGINE = [["--stage", "2"], ["--stage", "0", "--dtype", "bf16", "--no-offload"]]
ALONE = [["--no-offload"], ["--release-gradients", "--dtype", "bf16"]]
RUN = ["--steps", "7", "--warmup", "2", "--eval-every", "3", "--eval-batches", "1", "--log-every", "2"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def interrupted(monkeypatch):
    """Makes a signal come in the backward of a step."""

    def interrupt(at: int) -> None:
        backward = Loop._backward

        def with_signal(loop, step, lr):
            if step == at:
                os.kill(os.getpid(), signal.SIGINT)
            return backward(loop, step, lr)

        monkeypatch.setattr(Loop, "_backward", with_signal)
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)

    return interrupt


def without_times(records):
    return [
        {key: value for key, value in record.items() if "second" not in key and "bytes" not in key}
        for record in records
    ]


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("options", [*ENGINE, *ALONE], ids=" ".join)
@pytest.mark.parametrize("lost", [0, 1])
def test_after_ctrl_c_or_a_kill(options, lost, train, trained, interrupted, monkeypatch, tmp_path, results):
    """``lost``: checkpoints that the run did not come to write, as where it was killed before."""
    whole = trained(*RUN, *options)
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        interrupted(5)
        ran = train(*RUN, *options, "--out", out, "--save-every", "2")
        assert ran.code == 130
        assert "after step 5 of 7" in ran.out
        patch.undo()
    monkeypatch.undo()
    tags = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert tags == ["latest", "step4", "step5"]
    if lost:
        shutil.rmtree(out / "checkpoints" / "step5")
        (out / "checkpoints" / "latest").write_text("step4\n")
        with (out / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "train", "st')
    ran = train(*RUN, *options, "--out", out, "--save-every", "2", "--resume")
    assert (ran.code, ran.err) == (0, "")
    assert f"continuing after step {5 - lost}" in ran.out
    resumed = results(out)
    assert resumed.differing(whole) == []
    assert resumed.run["status"] == "finished"
    # Where the run stopped it logged a line more.
    logged = [record for record in resumed.metrics("train") if record["step"] % 2 == 0 or record["step"] == 7]
    if lost:
        assert without_times(logged) == without_times(whole.metrics("train"))
    assert without_times(resumed.metrics("validation")) == without_times(whole.metrics("validation"))


@pytest.mark.slow
def test_two_ranks(two_ranks, text, tmp_path, results):
    common = ["train", "--data", str(text), *MICRO_MODEL, *MICRO_RUN, "--stage", "3", "--save-every", "2"]
    two_ranks(command, [*common, "--out", str(tmp_path / "whole")])
    stopped = [*common, "--out", str(tmp_path / "stopped")]
    assert [code for code, _, _ in two_ranks(command, stopped, {0: (3, signal.SIGTERM)})] == [143, 143]
    assert [code for code, _, _ in two_ranks(command, [*stopped, "--resume"])] == [0, 0]
    assert results(tmp_path / "stopped").differing(results(tmp_path / "whole")) == []


def test_what_cannot_go_on(train, trained, tmp_path):
    out = tmp_path / "run"
    assert "has no run to continue" in train("--resume", "--out", out).refused()
    assert "needs --out" in train("--resume").refused()
    assert "leave one out" in train("--resume", "--overwrite", "--out", out).refused()
    assert "--plain trains without it: leave one out" in train("--save-every", "2", "--plain", "--out", out).refused()
    assert "at least 0" in train("--save-every", "-1", "--out", out).refused()
    assert train("--save-every", "2", "--out", out).code == 0
    other = train("--resume", "--out", out, "--lr", "0.5", "--seq-len", "8").refused()
    assert "--lr 0.001 there, 0.5 here; --seq-len 16 there, 8 here. Give the options that it was begun with" in other
    other = train("--resume", "--out", out, "--stage", "0").refused()
    assert "is another one: training without the engine there, by the engine (--stage) here. Give the options" in other
    other = train("--resume", "--out", out, "--schedule", "constant").refused()
    assert "is another one: --schedule cosine there, constant here. Give the options that it was begun with" in other
    assert f"(with its weights: --model {out} in place of --size)" in other
    other = train("--resume", "--out", out, "--states", "bf16", "--states-seed", "4").refused()
    assert "is another one: --states fp32 there, bf16 here. Give" in other
    other = train("--resume", "--out", out, "--release-gradients").refused()
    assert "--release-gradients False there, True here" in other
    (out / "run.json").write_text(json.dumps({"longshore": "0"}))
    assert "is another one" in train("--resume", "--out", out).refused()


@pytest.mark.medium
@pytest.mark.parametrize("options", [[], ["--stage", "1", "--dtype", "bf16"]], ids=["alone", "engine"])
def test_more_steps(options, train, tmp_path, results):
    run = [*options, "--schedule", "constant", "--warmup", "2", "--save-every", "3"]
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    assert train(*run, "--steps", "9", "--out", whole).code == 0
    for steps in (4, 9):
        assert train(*run, "--steps", steps, "--out", longer, "--resume-auto").code == 0
        assert json.loads((longer / "run.json").read_text())["settings"]["loop"]["steps"] == steps
    assert results(longer).differing(results(whole)) == []
    assert (
        "has made 9 steps, and --steps is 8: give at least 9"
        in train(*run, "--steps", "8", "--out", longer, "--resume").refused()
    )
    assert results(longer).differing(results(whole)) == []


@pytest.mark.medium
@pytest.mark.parametrize("options", [[], ["--stage", "1"]], ids=["alone", "engine"])
def test_formats_of_states(options, train, tmp_path, results):
    """A run goes on with the same random bits, and neither with others nor in another format."""
    run = [*options, "--schedule", "constant", "--save-every", "2"]
    encoded = [*run, "--states", "bf16", "--states-seed", "3"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(*encoded, "--out", whole).code == 0
    assert train(*encoded, "--steps", "2", "--out", stopped).code == 0
    again = ["--out", stopped, "--resume"]
    assert "--states bf16 there, fp32 here" in train(*run, *again).refused()
    assert "--states bf16 there, 8bit here" in train(*run, *again, "--states", "8bit").refused()
    assert "--states-seed 3 there, 4 here. Give" in train(*encoded, "--states-seed", "4", *again).refused()
    assert train(*encoded, *again).code == 0
    assert results(stopped).differing(results(whole)) == []


def test_a_run_from_before_there_were_formats(train, tmp_path):
    out, config = tmp_path / "run", tmp_path / "config.json"
    config.write_text("{}")
    assert train("--save-every", "2", "--out", out).code == 0
    run = json.loads((out / "run.json").read_text())
    del run["settings"]["optimizer"]["states"], run["settings"]["optimizer"]["states_seed"]
    (out / "run.json").write_text(json.dumps(run))
    assert "--states fp32 there, bf16 here" in train("--resume", "--out", out, "--states", "bf16").refused()
    seed = ("--resume", "--out", out, "--states-seed", "4")
    assert "--states-seed 4 is the seed of the rounding that --states bf16 and 8bit do" in train(*seed).refused()
    assert "states_seed = 4: is the seed of the rounding" in train(*seed, "--config", config).refused()
    assert "add --states, or leave --states-seed out" in train(*seed, "--stage", "1").refused()
    assert train("--resume", "--out", out).code == 0


def test_more_steps_of_a_schedule_that_follows_from_them(train, tmp_path):
    out, file = tmp_path / "run", tmp_path / "config.json"
    assert train("--save-every", "2", "--out", out).code == 0
    other = train("--resume", "--out", out, "--steps", "9").refused()
    assert "--steps 4 there, 9 here (with --schedule cosine the learning rate of each step follows from --s" in other
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "scheduler": scheduler}))
    run = ["--save-every", "2", "--out", tmp_path / "file", "--config", file, "--warmup", "2"]
    assert train(*run).code == 0
    other = train(*run, "--resume", "--steps", "9").refused()
    assert "scheduler in --config" in other and "--schedule" not in other


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "name, value",
    [
        ("prescale_gradients", True),
        ("data_types", {"grad_accum_dtype": "bf16"}),
        ("communication_data_type", "fp16"),
        ("gradient_predivide_factor", 2.0),
        ("optimizer", {"type": "AdamW", "params": {"betas": [0.5, 0.9]}}),
    ],
)
def test_another_configuration_whose_bits_differ_is_refused(name, value, train, tmp_path):
    out, config = tmp_path / "run", tmp_path / "config.json"
    file = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    config.write_text(json.dumps(file))
    assert train("--save-every", "2", "--out", out, "--config", config).code == 0
    config.write_text(json.dumps({**file, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}))
    assert train("--resume", "--out", out, "--config", config).code == 0
    config.write_text(json.dumps({**file, name: value}))
    assert " in --config " in train("--resume", "--out", out, "--config", config).refused()


@pytest.mark.medium
@pytest.mark.parametrize("spelled", [["--resume", "auto"], ["--resume=auto"], ["--resume-auto"]], ids="".join)
def test_one_line_for_a_script_that_is_queued_again(spelled, train, tmp_path, results, interrupted):
    out = tmp_path / "run"
    assert "needs --out" in train(*spelled).refused()
    assert "leave one out" in train(*spelled, "--overwrite", "--out", out).refused()
    assert train(*RUN, "--out", tmp_path / "straight").code == 0
    interrupted(5)
    first = train(*RUN, "--save-every", "2", *spelled, "--out", out)
    assert first.code == 130 and "continuing" not in first.out
    again = train(*RUN, "--save-every", "2", *spelled, "--out", out)
    assert again.code == 0 and "continuing after step 5" in again.out
    assert results(out).differing(results(tmp_path / "straight")) == []
    assert "--lr 0.001 there, 0.5 here" in train(*RUN, *spelled, "--lr", "0.5", "--out", out).refused()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    assert "is not empty and has no run of longshore" in train(*spelled, "--out", tmp_path / "theirs").refused()


def test_a_folder_that_cannot_be_written_is_found_first(train, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr("longshore.cli.job.read_text", None)
    assert f"{tmp_path} is not yours to write to: choose another" in train("--out", tmp_path / "a" / "b").refused()


def test_a_new_run_takes_the_former_checkpoints_away(train, tmp_path):
    out = tmp_path / "run"
    assert train("--save-every", "2", "--out", out).code == 0
    assert (out / "checkpoints").exists()
    assert train("--overwrite", "--out", out).code == 0
    assert not (out / "checkpoints").exists()
    ran = train("--resume", "--out", out)
    assert ran.code == 0
    assert "no checkpoint yet: from the beginning" in ran.out


@pytest.mark.medium
def test_another_number_of_ranks(two_ranks, train, text, tmp_path, results):
    """One process with two backwards a step goes on where two ranks with one each stopped."""
    common = ["--data", str(text), *MICRO_MODEL, *MICRO_RUN, "--save-every", "2"]
    two_ranks(command, ["train", *common, "--stage", "2", "--out", str(tmp_path / "whole")])
    stopped = ["train", *common, "--stage", "2", "--out", str(tmp_path / "stopped")]
    assert [code for code, _, _ in two_ranks(command, stopped, {0: (3, signal.SIGTERM)})] == [143, 143]
    alone = ("--save-every", "2", "--stage", "0", "--out", tmp_path / "stopped", "--resume")
    assert "backwards a step (ranks times --accumulation) 2 there, 1 here" in train(*alone).refused()
    ran = train(*alone, "--accumulation", "2")
    assert ran.code == 0
    assert "were saved by 2 ranks" in ran.err or "was saved by 2 ranks" in ran.err
    assert results(tmp_path / "stopped").differing(results(tmp_path / "whole")) == []


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_another_order_of_sums(two_ranks, train, text, tmp_path):
    """Several backwards on several ranks are added in an order of the stage, and not in that of one rank."""
    common = ["--data", str(text), *MICRO_MODEL, *MICRO_RUN, "--steps", "1", "--save-every", "1"]
    run = ["train", *common, "--out", str(tmp_path / "run"), "--accumulation", "2"]
    assert [code for code, _, _ in two_ranks(command, [*run, "--stage", "2"])] == [0, 0]
    for code, _, err in two_ranks(command, [*run, "--stage", "1", "--resume"])[:1]:
        assert code == 2 and "order of sums (ranks, --accumulation, --stage) 2 ranks times 2 backwards" in err
    assert [code for code, _, _ in two_ranks(command, [*run, "--stage", "3", "--resume"])] == [0, 0]
    alone = train(*common[2:], "--out", tmp_path / "run", "--resume", "--stage", "2", "--accumulation", "4").refused()
    assert "order of sums" in alone and "backwards a step" not in alone


OF_NO_BIT = {
    *("plain", "offload", "speculation_memory", "accumulate", "eval_every", "eval_batches", "log_every"),  # of options
    *(
        "out",
        "overwrite",
        "stage",
        "config",
        "trace",
        "save_every",
        "resume",
        "resume_auto",
    ),  # stage: the order of sums
    "states_seed",  # of float32 states, which are not rounded
    *("paths", "tokenizer", "device"),  # the tokens themselves are compared, and where the model is
    "activation_checkpointing",
    "stream",  # but for --release-gradients, which it means
}
OF_NO_BIT_IN_THE_ENGINE = {
    *("train_batch_size", "micro_batch_size", "gradient_accumulation_steps"),  # the loop's, which are compared
    *("managed_accumulation", "drop_last"),  # the loop declares each boundary, and has its own batches
    *(
        "stage",
        "offload_device",
        "param_device",
        "offload_ratio",
        "overlap_comm",
        "reduce_bucket_numel",
        "allgather_bucket_numel",
    ),
    *(
        "wrap_policy",
        "leaf_classes",
        "leaf_names",
        "leaf_name_suffixes",
        "gather_on_save",
        "detect_writes",
        "accumulate",
    ),
    "compute_grad_norm",
    *("tile_numel", "threads", "cpu_set", "cpu_share", "speculation_memory", "cpu_checkpointing"),
    *("states", "states_seed"),  # they are compared as options
    *("tensorboard", "wandb", "csv_monitor", "steps_per_print", "wall_clock_breakdown", "dump_state", "flops_profiler"),
}


def test_every_option_that_changes_a_bit_is_compared():
    """A new one is compared, or it is said here that it changes none."""
    changed = {
        "path": Path("m"),
        "schedule": "linear",
        "rule": "muon",
        "states": "8bit",
        "dtype": "bf16",
        "max_bytes": 9,
        "release_gradients": True,
    }
    settings = TrainSettings()
    before = _decisive(to_jsonable_python(settings))
    seen = set()
    for section in ("data", "model", "optimizer", "loop", None):
        part = settings if section is None else getattr(settings, section)
        for option in option_fields(type(part)):
            seen.add(option.name)
            if option.name not in OF_NO_BIT:
                other = replace(part, **{option.name: changed.get(option.name) or option.default + 1})
                now = other if section is None else replace(settings, **{section: other})
                assert _decisive(to_jsonable_python(now)) != before, option.name
    assert seen >= OF_NO_BIT
    fields = set(Config.model_fields)
    assert fields == {*_ENGINE, *OF_NO_BIT_IN_THE_ENGINE} and not OF_NO_BIT_IN_THE_ENGINE.intersection(_ENGINE)
    # The engine's load_checkpoint: the checkpoint itself has weights of one dtype and the optimizer's settings.
    assert set(_ENGINE) - {"dtype", "optimizer"} == {*OF_EACH_RANK, *BETWEEN_RANKS}


def test_another_device_is_another_run(train, tmp_path):
    out = tmp_path / "run"
    assert train("--save-every", "2", "--out", out).code == 0
    run = json.loads((out / "run.json").read_text())
    assert run["machine"]["device"] == "cpu"
    run["machine"]["device"] = "cuda"
    (out / "run.json").write_text(json.dumps(run))
    assert "--device cuda there, cpu here" in train("--resume", "--out", out).refused()
    del run["machine"]["device"]  # of an older version
    (out / "run.json").write_text(json.dumps(run))
    assert train("--resume", "--out", out).code == 0


def test_one_run_at_a_time(train, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert train("--save-every", "2", "--out", out).code == 0
    folder = output.RunFolder(out, overwrite=False, resume=True)
    folder._lock()
    assert "another run is writing to --out" in train("--resume", "--out", out).refused()
    assert "another run is writing to --out" in train("--overwrite", "--out", out).refused()
    folder.close()
    assert train("--resume", "--out", out).code == 0


def test_a_checkpoint_at_the_end(train, tmp_path, results):
    out = tmp_path / "run"
    assert train(*RUN, "--save-every", "4", "--out", out).code == 0
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", "step4", "step7"]
    first = results(out)
    ran = train(*RUN, "--save-every", "4", "--out", out, "--resume")
    assert ran.code == 0 and "continuing after step 7" in ran.out
    assert results(out).differing(first) == []
