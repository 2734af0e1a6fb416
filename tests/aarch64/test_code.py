"""What is looked for in the machine code of the kernels for aarch64, on lines that a disassembler printed."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.aarch64.code import check_steps, counts_of_steps
from scripts.aarch64.machine import Aarch64Error

PRINTED = """
0000000000000000 <void longshore::(anonymous namespace)::step_span<longshore::(anonymous namespace)::{rule}, A, B>()>:
   0:\tldr\tq0, [x0]
   4:\tprfm\tpldl1keep, [x0, #1024]
   8:\tfmul\tv1.4s, v0.4s, v2.4s
   c:\tfmla\tv1.4s, v0.4s, v2.4s
  10:\tfmla\tv1.4s, v1.4s, v2.4s
  14:\tfsqrt\tv3.4s, v1.4s
  18:\t{more}
  1c:\tstr\tq0, [x0]
0000000000000020 <longshore::(anonymous namespace)::squares(double*)>:
  20:\tfmadd\td0, d1, d2, d3
"""
RULES = ("Adam<false>", "Adam<true>", "Adagrad", "Lion", "Sgd<false>", "Sgd<true>", "MuonMomentum", "MuonUpdate")


def counted(rule: str, more: str) -> dict[str, Counter[str]]:
    """Eight rules whose code is right, but for what is in one of them in addition."""
    right = {"Adam<true>": "fmla\tv1.4s, v1.4s, v2.4s"}
    counts = {}
    for each in RULES:
        line = more if each == rule else right.get(each, "nop")
        counts |= counts_of_steps(PRINTED.replace("{rule}", each).replace("{more}", line))
    return counts


def test_steps_that_are_right_are_counted() -> None:
    said = check_steps(counted("", ""))
    assert said == "17 fused, 8 load, 8 prefetch, 8 root, 8 store"  # what is no step is not counted


@pytest.mark.parametrize(
    ("rule", "more", "said"),
    [
        ("Adam<false>", "fmla\tv5.4s, v1.4s, v2.4s", "3 fused instructions for 1 roots: 2 each"),  # one was contracted
        ("Adam<true>", "nop", "2 fused instructions for 1 roots: 3 each"),  # one is missing
        ("Lion", "fmadd\ts1, s2, s3, s4", "no vector code"),
        ("Adagrad", "fsqrt\ts1, s2", "no vector code"),
        ("Sgd<true>", "fdiv\ts1, s2, s3", "no vector code"),
    ],
)
def test_steps_that_are_wrong_are_refused(rule: str, more: str, said: str) -> None:
    with pytest.raises(Aarch64Error, match=said):
        check_steps(counted(rule, more))


def test_a_rule_that_is_not_found_is_refused() -> None:
    counts = counted("", "")
    del counts["Lion"]
    with pytest.raises(Aarch64Error, match="steps of"):
        check_steps(counts)
