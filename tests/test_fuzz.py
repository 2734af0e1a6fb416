"""The fuzzer bites: faults that are planted are found, and shrunk to a few lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.__main__ import main
from fuzz.compare import Finding, run
from fuzz.playing import Case, play, script_of, smallest
from fuzz.refusals import refusal_of
from fuzz.shrink import shrunk
from fuzz.vocabulary import SETS
from ranks import Ranks

from longshore.optim.family import RuleFamily
from longshore.optim.gradients import KeptGradients
from longshore.tiles import TileStore

PLAIN_LOOPS = tuple(each for each in SETS if each not in ("training", "clipping", "members"))
SEEDS = range(12)


def second_gradients_are_dropped(patch: pytest.MonkeyPatch) -> None:
    arrive = TileStore.arrive

    def once(self: TileStore, parameter: int, *args: Any, **options: Any) -> Any:
        return None if self.arrivals(parameter) else arrive(self, parameter, *args, **options)

    patch.setattr(TileStore, "arrive", once)


def steps_count_twice(patch: pytest.MonkeyPatch) -> None:
    after = RuleFamily.after
    patch.setattr(RuleFamily, "after", lambda *args: (made := after(*args))._replace(step=made.step + 1))


def the_last_parameter_is_left_out(patch: pytest.MonkeyPatch) -> None:
    collect = KeptGradients.collect
    patch.setattr(KeptGradients, "collect", lambda self: dict(list(collect(self).items())[:-1]))


def first_finding() -> tuple[Case, Finding]:
    for seed in SEEDS:
        case = Case(seed, PLAIN_LOOPS)
        if (found := run(case.program, case.compare_states).finding) is not None:
            return case, found
    raise AssertionError("nothing was found")


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "plant", [second_gradients_are_dropped, steps_count_twice, the_last_parameter_is_left_out], ids=lambda f: f.__name__
)
def test_a_planted_fault_is_found_and_shrunk_to_a_few_lines(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        case, found = first_finding()
        program = smallest(run, case.program, found, case.compare_states)
        assert run(program, case.compare_states).finding is not None
        assert sum(line.count("\n") + 1 for line in program) <= 7
    assert run(program, case.compare_states).finding is None


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
    main(["--seed", "7", "--show", "--one-line"])
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
