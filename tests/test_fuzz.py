"""The fuzzer bites: faults that are planted are found, and shrunk to a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fuzz.__main__ import main
from fuzz.compare import Finding, Outcome, run
from fuzz.playing import Case, Player, play, script_of, smallest
from fuzz.refusals import refusal_of
from fuzz.shrink import shrunk
from fuzz.vocabulary import SETS
from ranks import Ranks

import longshore
from longshore.checkpoint.optimizer_state import OptimizerState
from longshore.layout.formats import stream_of
from longshore.optim.family import RuleFamily
from longshore.optim.gradients import KeptGradients
from longshore.optim.rules.muon import MomentumRule
from longshore.streaming import blocks
from longshore.streaming.parameters import Lanes, StreamedParameter
from longshore.tiles import Tiles

PLAIN_LOOPS = tuple(each for each in SETS if each not in ("training", "clipping", "members"))
SEEDS = range(12)


def second_gradients_are_dropped(patch: pytest.MonkeyPatch) -> None:
    arrive = Tiles.arrive

    def once(self: Tiles, parameter: int, *args: Any, **options: Any) -> Any:
        return None if self.arrivals(parameter) else arrive(self, parameter, *args, **options)

    patch.setattr(Tiles, "arrive", once)


def steps_count_twice(patch: pytest.MonkeyPatch) -> None:
    after = RuleFamily.after
    patch.setattr(RuleFamily, "after", lambda *args: (made := after(*args))._replace(step=made.step + 1))


def the_last_parameter_is_left_out(patch: pytest.MonkeyPatch) -> None:
    collect = KeptGradients.collect
    patch.setattr(KeptGradients, "collect", lambda self: dict(list(collect(self).items())[:-1]))


def first_finding(kind: str = "", seeds: range = SEEDS, **how: Any) -> tuple[Case, Finding]:
    for seed in seeds:
        case = Case(seed, **how)
        found = IN_PROCESS(case.program, case.compare_states).finding
        if found is not None and kind in found.kind:
            return case, found
    raise AssertionError("nothing was found")


class InProcess(Player):
    """Plays all parts of a program in this process, one after the other."""

    def _play(self, world_size: int, part: list[str], compare_states: bool, folder: str) -> Outcome:
        assert world_size == 1
        return run(part, compare_states, folder)


IN_PROCESS = InProcess()


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "plant", [second_gradients_are_dropped, steps_count_twice, the_last_parameter_is_left_out], ids=lambda f: f.__name__
)
def test_a_planted_fault_is_found_and_shrunk_to_a_few_lines(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        case, found = first_finding(without=PLAIN_LOOPS)
        program = smallest(run, case.program, found, case.compare_states)
        assert run(program, case.compare_states).finding is not None
        assert sum(line.count("\n") + 1 for line in program) <= 7
    assert run(program, case.compare_states).finding is None


# -- other vocabularies ---------------------------------------------------------------------------


def random_bits_are_the_same_for_all_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("longshore.optim.offload.stream_of", lambda seed, name: stream_of(seed, ""))


def momentum_is_never_nesterovs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MomentumRule, "scalars", property(lambda self: (1.0 - self.momentum, self.momentum, 0.0)))


def step_counts_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OptimizerState, "restore_histories", lambda *_: None)


def a_file_without_clipping_is_clipped_to_another_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("longshore.compat.config.load._DEEPSPEED_CLIPPING", 0.01)


PLANTED = {
    "states": random_bits_are_the_same_for_all_parameters,
    "muon": momentum_is_never_nesterovs,
    "chains": step_counts_are_not_loaded,
    "files": a_file_without_clipping_is_clipped_to_another_norm,
}


@pytest.mark.medium
@pytest.mark.parametrize(
    "words_of",
    [
        pytest.param(each, marks=pytest.mark.needs_torch("torch.optim.Muon") if each == "muon" else ())
        for each in PLANTED
    ],
)
def test_each_vocabulary_finds_what_is_planted(words_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        PLANTED[words_of](patch)
        case, found = first_finding("differ", range(80), words_of=words_of)
    again = IN_PROCESS(case.program, case.compare_states).finding
    assert again is None or again.kind != found.kind


@pytest.mark.medium
def test_a_configuration_that_is_read_as_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(
        {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 2}, "parms": {}}}
    )
    program = ["m = Net()", f"e, o, p = initialized(m, {text!r})", "e.backward(e(1))", "e.step()"]
    assert run(program).refused == {"wrong configuration": 1}
    initialize = longshore.initialize

    def initialize_leniently(model: Any, config: Any) -> Any:
        config = json.loads(text)
        del config["optimizer"]["parms"]
        return initialize(model=model, config=config)

    with monkeypatch.context() as patch:
        patch.setattr("longshore.initialize", initialize_leniently)
        found = run(program).finding
    assert found is not None
    assert found.kind == "only plain PyTorch raises Unreadable"


def gradients_are_halved_on_their_way(patch: pytest.MonkeyPatch) -> None:
    bring = Lanes.bring
    patch.setattr(Lanes, "bring", lambda self, gradient: bring(self, gradient * 0.5))


def copies_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamedParameter, "wait", lambda self: None)


def graphs_are_kept(patch: pytest.MonkeyPatch) -> None:
    class Kept(blocks._Kept):
        all: ClassVar[list[Any]] = []

        def __init__(self, *_: Any) -> None:
            self.all.append(self)

    patch.setattr(blocks, "_Kept", Kept)


RACE = [
    "m = Blocks(dtype='bf16')\np = list(m.parameters())\nm = streamed(m)",
    "delays(1, 0, 20000)",
    *["with torch.no_grad():\n    y = m(3)\n\nwith torch.no_grad():\n    p[5].add_(1.0)\n    p[20].add_(1.0)\n\nsee(y)"]
    * 6,
]


@pytest.mark.gpu
@pytest.mark.medium
@pytest.mark.needs_torch("longshore.stream")
@pytest.mark.parametrize(
    ("plant", "kind"),
    [(gradients_are_halved_on_their_way, "differ"), (graphs_are_kept, "memory of the device is kept")],
)
def test_streams_find_what_is_planted(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ("hooks", "stream hooks", "stream changes")
    with monkeypatch.context() as patch:
        plant(patch)
        case, found = first_finding(kind, words_of="streams", without=quiet)
    again = IN_PROCESS(case.program, case.compare_states).finding
    assert again is None or again.kind != found.kind


@pytest.mark.gpu
@pytest.mark.needs_torch("longshore.stream")
def test_a_race_of_a_streamed_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "\n\n".join(RACE).split("\n\n")
    assert run(program).finding is None
    with monkeypatch.context() as patch:
        copies_are_not_waited_for(patch)
        found = run(program).finding
    assert found is not None
    assert found.kind == "what is seen differs"


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_a_chain_goes_over_ranks() -> None:
    program = [
        *("ranks(1)", "m = Net()", "o = AdamW(m.named_parameters())", "m(1).backward()", "o.step()", "keep('0', m, o)"),
        *("ranks(2)", "ours(stage=3)", "m = Net()\nn = list(m.named_parameters())", "e, o, p = engine(m, 'AdamW', n)"),
        *("e.backward(e(1 + rank))", "e.step()", "keep('1', m, e)"),
        *("ranks(1)", "ours(release_gradients=True)", "m = Net()", "o = AdamW(m.named_parameters())"),
        *("take('1', m, o)", "m(1).backward()", "o.step()"),
    ]
    player = Player()
    try:
        outcome = player(program, True)
        assert (outcome.finding, outcome.steps) == (None, 3)
        wrong = [*program[:-2], "m(1).backward() if type(o).__module__.startswith('longshore') else None", "o.step()"]
        found = player(wrong, True).finding
        assert found is not None
        assert found.place == len(wrong) - 1
    finally:
        player.stop()


@pytest.mark.medium
def test_without_a_fault_nothing_is_found() -> None:
    outcomes = [run(case.program, case.compare_states) for seed in SEEDS for case in [Case(seed, PLAIN_LOOPS)]]
    assert all(outcome.finding is None for outcome in outcomes), [outcome.finding for outcome in outcomes]
    assert sum(outcome.steps for outcome in outcomes) > 50


@pytest.mark.medium
def test_without_a_fault_nothing_is_found_in_engines() -> None:
    outcomes = [run(case.program, case.compare_states) for seed in range(8) for case in [Case(seed, engine=True)]]
    assert all(outcome.finding is None for outcome in outcomes), [outcome.finding for outcome in outcomes]
    assert sum(outcome.steps for outcome in outcomes) > 20


def test_a_parameter_that_comes_into_another_group_is_compared() -> None:
    program = [
        "ours(release_gradients=True)",
        "m = Net(dtype='fp16')\np = list(m.parameters())",
        "o = SGD([{'params': p[:1]}, {'params': p[1:0]}])",
        "out = o.param_groups[0]['params'].pop()\no.add_param_group({'params': [p[0]]})",
        *["m(1).backward()", "o.step()"] * 2,
    ]
    outcome = run(program, compare_states=True)
    assert (outcome.finding, outcome.steps) == (None, 2)


ONE_HEAD_EACH = [
    "ours(stage={stage}, tile_numel=50)",
    "m = Net()\np = list(m.parameters())",
    "e, o, p = engine(m, 'AdamW', p, lr=0.1, accumulation=2, clip=0.1)",
    *["e.backward(e(1 + rank))", "e.backward(e(2 + rank, rank))", "e.step()"] * 2,
]


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_on_two_ranks_is_compared_on_both(stage: int, two_ranks: Ranks) -> None:
    program = [each.format(stage=stage) for each in ONE_HEAD_EACH]
    for outcome in two_ranks(play, program, False):
        assert (outcome.finding, outcome.steps) == (None, 2)
    wrong = [*program[:-1], "e.backward(e(1) * (2.0 if type(e).__name__ == 'Engine' and rank else 1.0))", "e.step()"]
    found = [each.finding for each in two_ranks(play, wrong, False)]
    assert found[0] == found[1] and found[0] is not None and found[0].kind == "weights differ"


def test_a_seed_stands_for_one_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Case(7).program == Case(7).program != Case(8).program
    main(["--seed", "7", "--show", "--one-line", "--words", "scripts"])
    file = tmp_path / "case.py"
    file.write_text(shown := capsys.readouterr().out)
    assert shown.strip() == script_of(Case(7), Case(7).program)
    assert main(["--replay", str(file)]) == 0
    assert capsys.readouterr().out.strip() == "None"


def test_an_error_that_no_documentation_announces_is_a_finding() -> None:
    assert refusal_of(RuntimeError("this is a bug in longshore: please report it"), "SGD") is None
    filled = ValueError("zero_grad(set_to_none=False) fills .grad with zeros, and")
    assert refusal_of(filled, "SGD") == "zero_grad fills"
    assert [refusal_of(KeyError("step"), kind) is None for kind in ("AdamW", "Adagrad")] == [True, False]
    begin = ["m = Net()", "o = AdamW(m.parameters())", "if type(o).__module__.startswith('longshore'):\n    1 / 0"]
    found = run(begin).finding
    assert found is not None
    assert found.kind.startswith("only longshore raises ZeroDivisionError")


def test_shrinking_takes_out_statements_lines_and_arguments() -> None:
    program = ["a = f(1, b=3, c=[4])", "with x:\n    y()\n    needed(p[3], 17, z=1)", "more()"]

    def fails(lines: list[str]) -> bool:
        return any(line.startswith(("needed(", "with x:\n")) and "needed(" in line for line in lines)

    assert shrunk(program, fails) == ["needed(p[0], 0)"]
