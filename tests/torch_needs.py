"""What a test needs of torch: ``@pytest.mark.needs_torch("stage 3")`` skips it with an older one.

A feature of longshore has its torch in ``longshore/torch_versions.py``, which refuses it. What only tests need is here.
"""

from __future__ import annotations

import re

import pytest

from longshore.torch_versions import FEATURES, Feature

OTHERS = {
    feature.name: feature
    for feature in (
        Feature("FSDP2 over gloo", (2, 9), "give sums of gradients over the ranks, and not means"),
        # Torch 2.8 does not; there is no range of versions for the sake of one test.
        Feature("interleaved 1F1B over gloo", (2, 10), "mix up the messages of the stages of one rank"),
        Feature("torchrun --numa-binding", (2, 9), "have no such option"),
        Feature("GPipe that scales gradients last", (2, 9), "scale them before the last ones are sent"),
        Feature("set_state_dict() of fewer entries", (2, 9), "raise KeyError for flat names that are not there"),
    )
}
"""What only tests need, by name; none has the name of a feature."""

TORCHS_OWN_WARNINGS: dict[str, tuple[int, int]] = {
    "TypedStorage is deprecated": (2, 11),
    "The epoch parameter in `scheduler.step": (2, 9),
}
"""Beginnings of warnings that torch raises at itself, with the first torch that does not."""

_RANKS = {"two_ranks", "three_ranks", "four_ranks", "two_devices"}


def refusal(name: str) -> str | None:
    """Return why this torch is too old for something, or None."""
    error = (FEATURES | OTHERS)[name].refusal()
    return None if error is None else str(error)


def needs_of(item: pytest.Item) -> set[str]:
    """Return what a test is marked with, and stage 3 where a parameter says that ranks train by it."""
    needs = {mark.args[0] for mark in item.iter_markers("needs_torch")}
    if isinstance(item, pytest.Function) and _RANKS & set(item.fixturenames):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if any(_is_stage_3(name, value) for name, value in parameters.items()):
            needs.add("stage 3")
    return needs


def _is_stage_3(name: str, value: object) -> bool:
    by_name = name == "stage" and value == 3
    by_attribute = getattr(value, "stage", None) == 3
    return by_name or by_attribute or re.search(r"\bstage[ _]3|_stage_3", str(value)) is not None


def skip_stage_3(*stages: int) -> None:
    """Skip a test that several ranks would train by these stages, where one is 3 and this torch is too old for it."""
    if 3 in stages and (reason := refusal("stage 3")) is not None:
        pytest.skip(reason)


def skip_what_is_refused(items: list[pytest.Item]) -> None:
    """Mark all tests that need another torch than this one."""
    reasons = {name: refusal(name) for name in FEATURES | OTHERS}
    for item in items:
        for name in sorted(needs_of(item)):
            if (reason := reasons[name]) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def ignored_warnings() -> list[str]:
    """Return the beginnings of warnings that this torch raises at itself."""
    return [text for text, oldest in TORCHS_OWN_WARNINGS.items() if Feature(text, oldest, "").refusal() is not None]
