"""Stepping ahead, as a configuration asks for it; the weights are in test_table.py."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks
from support import loss_of, small_model

import longshore
from engine import speculation_cases
from engine.files import assert_same, file, started, train, without
from longshore.engine import ConfigError
from longshore.engine.binding import Neighbours, host_cpus
from longshore.engine.config import load_config
from longshore.kernels import HostKernels, usable_cpus

AHEAD = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}


def trained(content: dict[str, Any], steps: int = 5) -> tuple[Any, Any]:
    with started(content) as engine:
        for step in range(steps):
            train(engine, [loss_of(engine, step)])
        return engine.module, engine.explain(print_it=False).speculation


def test_super_offload() -> None:
    """One key turns it on, clipping stays on, and no bit changes."""
    model, record = trained(file(zero_optimization=AHEAD, gradient_clipping=1e9))
    plain, nothing = trained(file(gradient_clipping=1e9))
    assert record.kept == record.begun > 0 and nothing is None
    assert_same(model, plain)


def test_super_offload_where_clipping_acts() -> None:
    model, record = trained(file(zero_optimization=AHEAD, gradient_clipping=1e-3), steps=8)
    plain, _ = trained(file(gradient_clipping=1e-3), steps=8)
    assert not record.bets and record.begun == 0
    assert_same(model, plain)


@pytest.mark.parametrize(("memory", "spares"), [("auto", 1), ("1GiB", 1), ("100%", 1), (1 << 30, 1), (1024, 0)])
def test_the_setting_of_the_file(memory: Any, spares: int) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    _, record = trained(file(zero_optimization=zero, longshore={"speculation_memory": memory}))
    assert record.spares == spares


def test_without_it_nothing_is_stepped_ahead() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": False}}
    assert trained(file(zero_optimization=zero))[1] is None
    assert trained(file(zero_optimization=AHEAD, longshore={"speculation_memory": 0}))[1] is None


@pytest.mark.parametrize("value", ["all", -1, 1, 1.0, 1.5, True, [1]])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"longshore\.speculation_memory"):
        load_config(file(longshore={"speculation_memory": value}))


def test_it_needs_the_state_on_the_host() -> None:
    with pytest.raises(
        ConfigError,
        match=r"super_offload.* must agree with zero_optimization\.offload_optimizer\.device, which is none",
    ):
        load_config(file(zero_optimization={"stage": 2, "offload_optimizer": {"super_offload": True}}))


def test_a_device_that_is_refused_is_one_problem() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "super_offload": True}}
    with pytest.raises(ConfigError) as caught:
        load_config(file(zero_optimization=zero))
    assert [problem.path for problem in caught.value.problems] == ["zero_optimization.offload_optimizer.device"]


def test_what_a_number_means_is_said() -> None:
    with pytest.raises(ConfigError, match=r'a percentage such as "25%".*; for this share write "50%"'):
        load_config(file(zero_optimization=AHEAD, longshore={"speculation_memory": 0.5}))
    for key in ("cpuadam_cores_perc", "ratio"):
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True, key: 90}}
        with pytest.raises(ConfigError, match=rf"{key} = 90: must be a number .* at most 1 \(a share: 0\.9 for 90 %\)"):
            load_config(file(zero_optimization=zero))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("overlap", [None, True, False])
def test_where_gradients_are_reduced_in_step_it_says_so(stage: int, overlap: bool | None) -> None:
    keys = {} if overlap is None else {"overlap_comm": overlap}
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "super_offload": True}, **keys}
    notes = load_config(file(zero_optimization=zero)).notes
    assert any("then reduce gradients in step()" in note for note in notes) == (overlap is False and stage < 2)


@pytest.mark.parametrize(
    ("share", "place", "on_cpus", "expected"),
    [
        (None, 0, 1, (8, None)),
        (None, 1, 3, (2, None)),
        (0.5, 0, 1, (4, (4, 5, 6, 7))),
        (0.8, 0, 1, (6, (2, 3, 4, 5, 6, 7))),
        (0.0, 0, 1, (1, (7,))),
        (1.0, 1, 2, (4, (4, 5, 6, 7))),
        (0.5, 0, 2, (2, (2, 3))),
        (0.5, 10, 16, (1, (5,))),  # more ranks than CPUs
    ],
)
def test_the_share_of_the_cpus(
    share: float | None, place: int, on_cpus: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that this rank has for itself, the last ones; several ranks have parts that do not meet."""
    monkeypatch.setattr("longshore.engine.binding.usable_cpus", lambda: list(range(8)))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    if share is not None:
        zero["offload_optimizer"] |= {"cpuadam_cores_perc": share}
    content = without(file(zero_optimization=zero), "longshore")
    assert host_cpus(load_config(content).config, Neighbours(on_cpus, on_cpus, place)) == expected


def test_host_threads_run_on_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def spy(threads: Any, cpu_set: Any) -> HostKernels:
        made.append((threads, cpu_set))
        return HostKernels(threads, cpu_set)

    monkeypatch.setattr("longshore.optim.offload.HostKernels", spy)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.01}}
    trained(without(file(zero_optimization=zero), "longshore"), steps=2)
    assert made == [(1, (usable_cpus()[-1],))]


def test_cpus_are_chosen_once() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.5}}
    for keys, path in (({"threads": 2}, "longshore.threads"), ({"cpu_set": [0]}, "longshore.cpu_set")):
        with pytest.raises(ConfigError) as caught:
            load_config(file(zero_optimization=zero, longshore=keys))
        (problem,) = caught.value.problems
        assert problem.path == "zero_optimization.offload_optimizer.cpuadam_cores_perc"
        assert f"excludes {path}, which chooses host threads too; leave one of them out" in problem.what
    with pytest.raises(
        ConfigError, match=r"cpu_share 0\.5 chooses host threads and their CPUs, and threads or cpu_set"
    ):
        longshore.Config(train_batch_size=1, cpu_share=0.5, threads=2)
    zero["offload_optimizer"]["super_offload"] = False  # then nobody reads it
    assert load_config(file(zero_optimization=zero)).config.cpu_share is None


def test_the_page_says_what_was_stepped_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(zero_optimization=AHEAD)) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
        engine.explain()
    assert "stepped ahead: 10 tiles, 10 kept" in capsys.readouterr().out


def test_announced_accumulation_is_expected() -> None:
    """From 1 to 3 backwards a step: the first window of three is bet on its last backward."""
    model = small_model()
    offload = longshore.Offload(speculation_memory="100%")
    with started(file(gradient_clipping=0.0), model, offload=offload) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
        engine.set_gradient_accumulation_steps(3)
        for micro in range(3):
            engine.backward(loss_of(engine, micro))
            engine.step()
        record = engine.optimizer.speculation
    assert (record.begun, record.kept) == (1, 1)


def test_ranks_of_one_machine_share_what_auto_grants(two_ranks: Ranks) -> None:
    assert two_ranks(speculation_cases.granted, 1_000_000) == [500_000, 500_000]
    assert two_ranks(speculation_cases.granted, 0) == [1024, 1024]
