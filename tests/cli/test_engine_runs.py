"""``--stage`` and ``--config``: one rank in this process, two in the pool, and two under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from cli.conftest import MICRO_MODEL, MICRO_RUN, WRITTEN
from cli.rank_cases import command

from longshore.cli.engine_settings import MUON_PARAMS
from longshore.cli.model import load_transformers
from longshore.engine.config import WarmupDecayLRConfig
from longshore.engine.schedules import make_schedule

CLIPPING = ["--clip", "0.5"]
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 0.5,
}
SUPER_OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
STATES = {"stage": 2, "offload_optimizer": {"device": "cpu", "states": "8bit", "states_seed": 3}}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """The engine trains on CUDA where there is CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def micro(text) -> list[str]:
    return ["train", "--data", str(text), *MICRO_MODEL, *MICRO_RUN]


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file: ``FILE`` with other values; None takes a key out."""

    def write(**changes: object):
        path = tmp_path / "ds.json"
        content = {key: value for key, value in {**FILE, **changes}.items() if value is not None}
        path.write_text(json.dumps(content))
        return path

    return write


class TestOneRank:
    @pytest.mark.covering(1)
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("options", [["--stage", "0"], ["--stage", "2", "--no-offload"]], ids=" ".join)
    def test_equals_plain(self, trained, dtype, options):
        common = ["--clip", "0", "--dtype", dtype, "--warmup", "2", "--schedule", "linear"]
        assert trained(*common, *options).differing(trained(*common, "--plain")) == []

    def test_fp16_needs_no_file(self, trained, config):
        """As the refusal without an engine advises. The option is the file's section."""
        ours = trained("--dtype", "fp16", "--stage", "2", *CLIPPING)
        assert {weight.dtype for weight in ours.weights.values()} == {torch.float16}
        assert ours.differing(trained("--config", config(fp16={"enabled": True}))) == []

    @pytest.mark.parametrize("accumulation", ["1", "3"])
    def test_equals_without_the_engine_when_clipping(self, trained, accumulation):
        common = [*CLIPPING, "--accumulation", accumulation, "--log-every", "1"]
        ours, other = trained(*common, "--stage", "1"), trained(*common, "--release-gradients")
        assert ours.differing(other) == []
        norms = [[record["grad_norm"] for record in each.metrics("train")] for each in (ours, other)]
        assert norms[0] == norms[1] and min(norms[0]) > 0.5

    def test_run_json(self, trained):
        run = trained("--stage", "1", *CLIPPING).run
        engine = run["settings"]["engine"]
        assert engine["config"]["stage"] == 1 and engine["config"]["gradient_clipping"] == 0.5
        assert run["settings"]["loop"]["ranks"] == 1

    @pytest.mark.parametrize("where", ["loss", "gradient's norm"])
    def test_diverged(self, trained, train, monkeypatch, where, results, tmp_path):
        """The step is not applied: the weights are those of the last good one."""
        good = trained("--stage", "2", "--steps", "2", "--schedule", "constant")
        from longshore.cli import job

        prepare, calls = job._prepare, []

        def poison(*_):
            calls.append(1)
            return len(calls) == 3

        def poisoned(*given):
            prepared = prepare(*given)
            head = prepared.model.get_submodule("lm_head")
            if where == "loss":
                head.register_forward_hook(lambda *inputs: inputs[-1] * torch.inf if poison() else None)
            else:
                head.register_full_backward_pre_hook(
                    lambda _, gradients: (gradients[0] * torch.inf,) if poison() else None
                )
            return prepared

        monkeypatch.setattr(job, "_prepare", poisoned)
        ran = train("--stage", "2", "--schedule", "constant", "--out", tmp_path / "bad")
        assert ran.code == 1
        assert f"the {where} is nan at step 3, so this step was not applied" in ran.refused()
        assert results(tmp_path / "bad").differing(good) == []

    @pytest.mark.parametrize("stage", ["0", "2"])
    def test_stepping_ahead(self, trained, cli, micro, results, tmp_path, stage):
        common = ["--stage", stage, *CLIPPING]
        without = trained(*common)
        ran = cli(*micro, *common, "--speculation-memory", "100%", "--out", tmp_path / "ahead")
        ahead = results(tmp_path / "ahead")
        assert ran.err == "", "the note about several ranks is not for one"
        assert ahead.run["settings"]["engine"]["config"]["speculation_memory"] == "100%"
        assert ahead.run["result"]["host_bytes"] > 1.5 * without.run["result"]["host_bytes"]
        assert ahead.differing(without) == []


class TestFile:
    def test_unset_options_are_the_files(self, trained, config):
        """The file alone, the command line alone, and both where they agree."""
        options = ["--stage", "2", *CLIPPING, "--lr", "1e-3", "--weight-decay", "0.1", "--offload"]
        alone = trained("--config", config())
        assert alone.differing(trained(*options)) == []
        assert alone.differing(trained("--config", config(), *options, "--batch-size", "2", "--dtype", "fp32")) == []
        run = alone.run["settings"]
        assert run["optimizer"]["clip"] == 0.5 and run["engine"]["config"]["stage"] == 2

    @pytest.mark.quick(0)
    @pytest.mark.parametrize(
        "change, option",
        [
            ({"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}}, ["--lr", "0.01"]),
            ({"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}, ["--weight-decay", "0"]),
            ({"gradient_clipping": 0.1}, ["--clip", "0.1"]),
            ({"gradient_clipping": 0}, ["--clip", "0"]),
            ({"gradient_accumulation_steps": 3}, ["--accumulation", "3"]),
            ({"train_batch_size": 6}, ["--accumulation", "3"]),
            ({"bf16": {"enabled": True}}, ["--dtype", "bf16"]),
            ({"optimizer": None}, []),
        ],
        ids=str,
    )
    def test_each_key_is_its_option(self, trained, config, change, option):
        plain = ["--stage", "2", *CLIPPING, *option]
        assert trained("--config", config(**change)).differing(trained(*plain)) == []

    def test_what_the_file_leaves_out_the_option_gives(self, trained, config):
        bare = {"zero_optimization": {"stage": 2}, "gradient_clipping": None, "train_micro_batch_size_per_gpu": None}
        options = ["--clip", "0.1", "--dtype", "bf16", "--batch-size", "3", "--accumulation", "2"]
        ours = trained("--config", config(**bare), *options)
        assert ours.differing(trained("--stage", "2", *options)) == []

    @pytest.mark.parametrize("option", ["50%", "8GiB", "auto"])
    def test_super_offload_leaves_the_memory_to_the_option(self, trained, config, option):
        run = trained("--config", config(zero_optimization=SUPER_OFFLOAD), "--speculation-memory", option).run
        assert str(run["settings"]["engine"]["config"]["speculation_memory"]) == option
        assert str(run["settings"]["optimizer"]["speculation_memory"]) == option

    def test_the_format_of_states_is_said_by_either(self, trained, config):
        """The file, the command line with and without an engine, and DeepSpeed's key beside the option."""
        offload = {"device": "cpu", "states": "bf16", "states_seed": 3}
        by_file = trained("--config", config(zero_optimization={"stage": 2, "offload_optimizer": offload}))
        options = ["--states", "bf16", "--states-seed", "3"]
        assert by_file.differing(trained("--stage", "2", *CLIPPING, *options)) == []
        assert by_file.differing(trained("--config", config(bf16={"bf16_optimizer_states": True}), *options)) == []
        assert by_file.differing(trained("--release-gradients", *CLIPPING, *options)) == []
        assert by_file.run["settings"]["optimizer"]["states_seed"] == 3
        others = (["--states", "bf16"], [])
        assert all(by_file.differing(trained("--stage", "2", *CLIPPING, *given)) for given in others)

    def test_auto(self, trained, config):
        auto = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        }
        options = ["--clip", "0.2", "--lr", "0.01", "--dtype", "bf16", "--accumulation", "2"]
        assert trained("--config", config(**auto), *options).differing(trained("--stage", "2", *options)) == []

    def test_a_schedule_of_the_file(self, trained, config):
        params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.01, "warmup_type": "linear"}
        run = trained(
            "--config", config(scheduler={"type": "WarmupDecayLR", "params": params}), "--log-every", "1",
            "--schedule", "linear", "--warmup", "2", "--steps", "6",
        )  # fmt: skip
        rates = [record["lr"] for record in run.metrics("train")]
        parameter = torch.nn.Parameter(torch.zeros(16))
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)
        schedule, expected = make_schedule(WarmupDecayLRConfig(**params), optimizer), []
        for _ in rates:
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates == expected and max(rates) == 0.01
        assert run.run["settings"]["optimizer"]["schedule"] is None

    def test_a_loss_scale_that_overflows(self, trained, config):
        """The steps under too large a scale are skipped, counted, and are no divergence."""
        run = trained("--config", config(fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}),
                      "--log-every", "1", "--steps", "20")  # fmt: skip
        records = run.metrics("train")
        skipped = records[-1]["skipped"]
        assert 0 < skipped < 20
        assert sum(record["grad_norm"] is None for record in records) == skipped

    def test_a_note_is_said_once(self, train, config):
        ran = train("--config", config(gradient_clipping=None))
        assert ran.code == 0
        assert ran.err.count("\n") == 1 and "ds.json: gradient_clipping is not given, which means 1" in ran.err

    def test_every_problem_in_one_line(self, train, config):
        ran = train("--config", config(gradient_cliping=1.0, zero_optimization={"stage": 5}, train_batch_size=-1))
        refused = ran.refused()
        assert ran.code == 2
        assert "ds.json has 3 problems: (1) " in refused and "(3) " in refused
        for name in ("gradient_cliping", "zero_optimization.stage", "train_batch_size"):
            assert name in refused

    def test_no_file(self, train, tmp_path):
        ran = train("--config", tmp_path / "nowhere.json")
        assert ran.code == 2 and "there is no such file" in ran.refused()

    def test_batches_that_do_not_multiply_out(self, train, config):
        ran = train("--config", config(train_batch_size=6), "--accumulation", "2")
        assert ran.code == 2
        assert "6 is not --batch-size 2 x --accumulation 2 x 1 rank = 4; change train_batch_size to 4" in ran.refused()

    @pytest.mark.parametrize(
        "change, option, message",
        [
            ({}, ["--lr", "0.01"], "optimizer.params.lr = 0.001: contradicts --lr 0.01"),
            ({}, ["--weight-decay", "0"], "optimizer.params.weight_decay = 0.1: contradicts --weight-decay 0.0"),
            ({}, ["--clip", "1"], "gradient_clipping = 0.5: contradicts --clip 1.0"),
            ({}, ["--batch-size", "3"], "train_micro_batch_size_per_gpu = 2: contradicts --batch-size 3"),
            ({"gradient_accumulation_steps": 1}, ["--accumulation", "3"],
             "gradient_accumulation_steps = 1: contradicts --accumulation 3"),
            ({}, ["--stage", "1"], "zero_optimization.stage = 2: contradicts --stage 1"),
            ({}, ["--no-offload"], 'zero_optimization.offload_optimizer.device = "cpu": contradicts --no-offload'),
            ({"bf16": {"enabled": False}}, ["--dtype", "bf16"], "bf16.enabled = false: contradicts --dtype bf16"),
            ({"bf16": {"enabled": True}}, ["--dtype", "fp32"], "bf16.enabled = true: contradicts --dtype fp32"),
            ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, ["--dtype", "bf16"],
             "torch_autocast.enabled = true: contradicts --dtype bf16"),
            ({"scheduler": {"type": "WarmupLR"}}, ["--schedule", "cosine"],
             'scheduler.type = "WarmupLR": contradicts --schedule cosine'),
            ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}, ["--warmup", "8"],
             "scheduler.params.warmup_num_steps = 7: contradicts --warmup 8"),
            ({"scheduler": {"type": "LRRangeTest"}}, ["--warmup", "8"],
             'scheduler.type = "LRRangeTest": contradicts --warmup 8'),
            ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9000, "warmup_max_lr": 0.5}}},
             ["--lr", "0.001"], "scheduler.params.warmup_max_lr = 0.5: contradicts --lr 0.001"),
            ({"longshore": {"speculation_memory": "50%"}}, ["--speculation-memory", "100%"],
             'longshore.speculation_memory = "50%": contradicts --speculation-memory 100%'),
            ({"zero_optimization": STATES}, ["--states", "fp32"],
             'zero_optimization.offload_optimizer.states = "8bit": contradicts --states fp32'),
            ({"zero_optimization": STATES}, ["--states-seed", "4"],
             "zero_optimization.offload_optimizer.states_seed = 3: contradicts --states-seed 4"),
            ({"bf16": {"bf16_optimizer_states": True}}, ["--states", "8bit"],
             "bf16.bf16_optimizer_states = true: contradicts --states 8bit"),
            ({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}, ["--states", "fp32"],
             "optimizer.params.fp32_optimizer_states = false: contradicts --states fp32"),
            ({"zero_optimization": SUPER_OFFLOAD}, ["--speculation-memory", "0"],
             "zero_optimization.offload_optimizer.super_offload = true: contradicts --speculation-memory 0"),
            ({"steps_per_print": 3}, ["--log-every", "2"], "steps_per_print = 3: contradicts --log-every 2"),
        ],
        ids=str,
    )  # fmt: skip
    def test_contradictions(self, cli, text, config, change, option, message):
        ran = cli("train", "--data", text, *MICRO_MODEL, "--config", config(**change), *option)
        assert ran.code == 2
        assert f"ds.json: {message}; change one, or leave the option out" in ran.refused()

    @pytest.mark.quick(0)
    @pytest.mark.parametrize("every, options", [(1, []), (2, []), (None, ["--log-every", "1"])])
    def test_a_step_has_one_line(self, train, config, results, tmp_path, every, options):
        """steps_per_print of the file is --log-every, and the engine prints no line beside it."""
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
        file = config(steps_per_print=every, scheduler=schedule)
        ran = train("--config", file, "--warmup", 4, *options, "--out", tmp_path / "run")
        lines = [line for line in ran.out.splitlines() if " lr " in line]
        assert [line.split("/4")[0] for line in lines] == [f"step {step}" for step in range(every or 1, 5, every or 1)]
        rates = [f"{record['lr']:.2e}" for record in results(tmp_path / "run").metrics("train")]
        assert len(set(rates)) > 1
        assert [line.split(" lr ")[1].split()[0] for line in lines] == rates

    @pytest.mark.parametrize("options", [[], ["--log-every", "2"]])
    def test_times_are_the_engines_with_the_same_rate(self, train, config, options):
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
        every = None if options else 2
        file = config(wall_clock_breakdown=True, steps_per_print=every, scheduler=schedule)
        lines = [line for line in train("--config", file, "--warmup", 4, *options).out.splitlines() if " lr " in line]
        assert len(lines) == 4
        for timed, line in zip(lines[::2], lines[1::2], strict=True):
            assert " ms" in timed and "/4  loss" in line
            assert float(timed.split(" lr ")[1].split(",")[0]) == float(line.split(" lr ")[1].split()[0])

    def test_all_contradictions_at_once(self, cli, config):
        refused = cli("train", "--config", config(), "--lr", "1", "--clip", "2").refused()
        assert "--lr 1.0" in refused and "--clip 2.0" in refused


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stage", "4"], "--stage must be at most 3, not 4"),
        (["--stage", "2", "--release-gradients"], "--release-gradients is what --stage and --config do in any case"),
        (
            ["--stage", "2", "--speculation-memory", "50%", "--no-offload"],
            "--speculation-memory is for stepping on the",
        ),
        (["--stage", "1", "--lr", "nan"], "--lr must be a finite number, not nan"),
    ],
    ids=str,
)
def test_refused(train, options, message):
    ran = train(*options)
    assert ran.code == 2 and message in ran.refused()


def test_the_cpu_beside_cuda(train, monkeypatch):
    monkeypatch.setattr("longshore.cli.job.accelerator_type", lambda: "cuda")
    assert "--device cpu: with --stage or --config training is on CUDA" in train("--stage", "2").refused()


class TestTwoRanks:
    @pytest.mark.medium
    @pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3])
    def test_equals_one_process(self, two_ranks, micro, trained, results, tmp_path, stage):
        """Each rank has every second batch of what one process has as two backwards; and the files are written once."""
        run = [*CLIPPING, "--eval-every", "2", "--eval-batches", "3", "--log-every", "1"]
        out = tmp_path / "two"
        ranks = two_ranks(command, [*micro, *run, "--stage", str(stage), "--out", str(out)])
        assert [rank[0] for rank in ranks] == [0, 0]
        assert f"stage {stage} on 2 ranks" in ranks[0][1] and "written to" in ranks[0][1]
        assert ranks[1][1:] == ("", "")
        ours, one = results(out), trained(*run, "--accumulation", "2", "--release-gradients")
        assert ours.names == WRITTEN
        assert ours.differing(one) == []
        for kind in ("train", "validation"):
            mine, theirs = ours.metrics(kind), one.metrics(kind)
            assert [record["loss"] for record in mine] == pytest.approx([record["loss"] for record in theirs], 1e-7)
            assert [record.get("tokens") for record in mine] == [record.get("tokens") for record in theirs]
        norms = [record["grad_norm"] for record in ours.metrics("train")]
        assert norms == [record["grad_norm"] for record in one.metrics("train")]
        assert min(norms) > 0.5, "nothing was clipped"
        assert ours.metrics("validation") == one.metrics("validation")

    @pytest.mark.medium
    @pytest.mark.needs_torch("stage 3")
    def test_from_a_folder_that_rank_0_reads(self, two_ranks, text, tmp_path):
        """Its tied weights are one tensor in the file that is written, at every stage."""
        from safetensors.torch import load_file

        torch.manual_seed(0)
        transformers = load_transformers()
        config = transformers.LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
        found = []
        for stage in ("2", "3"):
            out = tmp_path / stage
            model = ["--model", str(tmp_path / "model"), "--stage", stage, "--out", str(out)]
            run = ["train", "--data", str(text), *MICRO_RUN, *model]
            assert [rank[0] for rank in two_ranks(command, run)] == [0, 0]
            (file,) = out.rglob("model.safetensors")
            found.append(load_file(file))
        two, three = found
        assert two.keys() == three.keys() and "lm_head.weight" not in two
        assert all(torch.equal(two[name], three[name]) for name in two)

    @pytest.mark.medium
    def test_a_signal_to_one_rank_ends_both(self, two_ranks, micro, trained, results, tmp_path):
        out = tmp_path / "two"
        options = ["--stage", "2", "--schedule", "constant"]
        ranks = two_ranks(
            command, [*micro, *options, "--steps", "1000", "--out", str(out)], {1: (3, int(signal.SIGTERM))}
        )
        assert [rank[0] for rank in ranks] == [143, 143]
        assert "SIGTERM: ended after step 3 of 1000" in ranks[0][1]
        assert results(out).run["status"] == "interrupted"
        short = trained("--steps", "3", "--schedule", "constant", "--accumulation", "2", "--release-gradients")
        assert results(out).differing(short) == []

    def test_nobody_says_how_to_share(self, two_ranks, micro):
        ranks = two_ranks(command, micro)
        assert [rank[0] for rank in ranks] == [2, 2]
        assert "2 ranks were started, and nothing says how they share the work: add --stage" in ranks[0][2]
        assert ranks[1][2] == ""

    def test_stepping_ahead_needs_gradients_before_the_step(self, two_ranks, micro, config):
        zero = {"stage": 1, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}
        options = ["--config", str(config(zero_optimization=zero)), "--speculation-memory", "50%"]
        ranks = two_ranks(command, [*micro, *options])
        assert [rank[0] for rank in ranks] == [2, 2]
        assert "with 2 ranks, stage 1 and overlap_comm false gradients are reduced in the step: leave" in ranks[0][2]

    def test_what_one_rank_refuses_ends_both(self, two_ranks, micro, trained):
        """Only rank 0 looks at --out."""
        ranks = two_ranks(command, [*micro, "--stage", "1", "--out", str(trained().folder)])
        assert [rank[0] for rank in ranks] == [2, 2]
        assert "has a run already: choose another folder" in ranks[0][2]
        assert ranks[0][2].count("\n") == 1 and ranks[1][2] == ""

    def test_diverged(self, two_ranks, micro, tmp_path, results):
        run = [
            "--stage",
            "2",
            "--lr",
            "1e20",
            "--schedule",
            "constant",
            "--steps",
            "50",
            "--out",
            str(tmp_path / "run"),
        ]
        ranks = two_ranks(command, [*micro, *run])
        assert [rank[0] for rank in ranks] == [1, 1]
        assert "so this step was not applied and the run stopped" in ranks[0][2] and ranks[1][2] == ""
        assert results(tmp_path / "run").run["status"] == "diverged"


def start(*arguments: object, **options) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        **options,
    )


def ours(errors: str) -> list[str]:
    """The lines that are not torchrun's."""
    return [line for line in errors.splitlines() if line.startswith("longshore: ")]


@pytest.mark.slow
class TestTorchrun:
    def test_ctrl_c(self, micro, tmp_path, results):
        out = tmp_path / "stopped"
        process = start(
            "-m", "longshore", *micro, "--stage", "2", "--steps", "1000000", "--log-every", "1", "--out", out
        )
        assert process.stdout is not None
        seen = ""
        while "step       2/1000000" not in seen:
            seen = process.stdout.readline()
            assert seen, process.communicate()[1]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert ours(errors) == ["longshore: ending after this step; once more ends at once"], errors
        assert rest.count("Ctrl-C: ended after step") == 1 and "written to" in rest
        assert results(out).names == WRITTEN
        run = results(out).run
        assert run["status"] == "interrupted"
        assert run["result"]["steps"] == len(results(out).metrics("train")) >= 2

    def test_a_rank_that_fails(self, micro, tmp_path):
        """It says why, the other one says that it is not to blame, and both end long before any limit of torch."""
        script = tmp_path / "failing.py"
        script.write_text(
            "import os, sys\n"
            "from longshore.cli import loop, main\n"
            "original = loop.Loop._loss\n"
            "def loss(self, batch):\n"
            "    if os.environ['RANK'] == '1' and len(calls) == 3:\n"
            "        raise MemoryError('no more of it')\n"
            "    calls.append(1)\n"
            "    return original(self, batch)\n"
            "calls = []\n"
            "loop.Loop._loss = loss\n"
            "sys.exit(main())\n"
        )
        process = start(script, *micro, "--stage", "2", "--steps", "1000000", "--log-every", "1")
        assert process.stdout is not None
        while "step" not in process.stdout.readline():
            pass
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        lines = [line for line in ours(errors) if "ending after this step" not in line]
        assert "longshore: rank 1: out of memory (no more of it): try a smaller --batch-size" in lines[0], errors
        assert all("rank 0: rank 1 has ended or cannot be reached: its own line says" in line for line in lines[1:])
        assert "longshore/cli" not in errors, "a traceback of ours"


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, (0, 1, True)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (1, 2, False)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (2, 4, True)),
        ({"RANK": "x"}, (0, 1, True)),
    ],
    ids=str,
)
def test_launched_rank(monkeypatch, environ, expected):
    from longshore.cli.terminal import launched_rank

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert tuple(launched_rank()) == expected


@pytest.mark.needs_torch("torch.optim.Muon")
class TestMuon:
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_equals_plain(self, trained, dtype):
        """With an engine, and without one; several backwards and clipping are compared with each other below."""
        common = ["--optimizer", "muon", "--clip", "0", "--dtype", dtype, "--warmup", "2"]
        plain = trained(*common, "--plain")
        assert trained(*common).differing(plain) == []
        assert trained(*common, "--stage", "1").differing(plain) == []
        assert plain.differing(trained(*common[2:], "--plain")) != []  # of AdamW

    def test_engine_and_optimizer_agree(self, trained):
        common = ["--optimizer", "muon", *CLIPPING, "--accumulation", "3"]
        assert trained(*common, "--stage", "3").differing(trained(*common, "--release-gradients")) == []

    def test_of_a_file(self, trained, config):
        params = {"lr": 1e-3, "weight_decay": 0.1, **MUON_PARAMS}
        file = config(optimizer={"type": "Muon", "params": params})
        ours = trained("--config", file)
        assert ours.differing(trained("--optimizer", "muon", "--stage", "2", *CLIPPING)) == []

    def test_rates_of_a_file_are_kept(self, train, results, config, tmp_path):
        """``train``'s own schedule goes from each group's rate; the first version gave all groups that of --lr."""
        params = {"muon_lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1, **MUON_PARAMS}
        file = config(optimizer={"type": "Muon", "params": params})
        ran = train(
            "--config", file, "--schedule", "linear", "--warmup", "2", "--log-every", "1", "--out", tmp_path / "run"
        )
        assert ran.code == 0 and "lr 1.50e-04, 1.00e-02 " in ran.out
        rates = [record["lrs"] for record in results(tmp_path / "run").metrics("train")]
        assert rates == [[3e-4 * share, 0.02 * share] for share in (0.5, 1, 1, 0.5)]
        told = train("--config", file, "--lr", "0.02").refused()
        assert "optimizer.params.adam_lr = 0.0003: contradicts --lr 0.02" in told and "muon_lr" not in told

    def test_a_file_that_names_another(self, train, config):
        assert (
            'optimizer.type = "AdamW": contradicts --optimizer muon'
            in train("--config", config(), "--optimizer", "muon").refused()
        )

    @pytest.mark.medium
    def test_goes_on(self, train, results, tmp_path):
        common = ["--optimizer", "muon", "--schedule", "constant", "--save-every", "1", "--log-every", "1"]
        whole, stopped = tmp_path / "whole", tmp_path / "stopped"
        assert train(*common, "--steps", "4", "--out", whole).code == 0
        assert train(*common, "--steps", "2", "--out", stopped).code == 0
        assert "--optimizer" in train(*common[2:], "--steps", "4", "--out", stopped, "--resume").refused()
        assert train(*common, "--steps", "4", "--out", stopped, "--resume").code == 0
        assert results(stopped).differing(results(whole)) == []
