"""Any file loads or is a ConfigError; a misspelled key is recognized."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from compat.config.strategies import fine_values_of, insert, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.compat.config.keys import Key, Treatment
from longshore.compat.config.kinds import Block
from longshore.compat.config.reading import names_in, unknown
from longshore.compat.config.table import KEYS, SECTIONS, TABLE
from longshore.engine.config import Config, ConfigError, LoadedConfig, load_config
from longshore.engine.config.base import edits
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from longshore.kernels import MOST_HOST_THREADS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({name for _, name in KEYS} | {path.rpartition(".")[2] for path in SECTIONS})


@st.composite
def files(draw: st.DrawFn, fine: bool) -> dict[str, Any]:
    """A few keys with values that are legal for them; ``fine``: and not refused one by one."""
    file: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1} if fine else {}
    for key in draw(st.lists(st.sampled_from(TABLE), max_size=8, unique_by=lambda key: key.path)):
        insert(file, key, draw(fine_values_of(key) if fine else values_of(key.kind)))
    for section, types in (("optimizer", OPTIMIZER_CONFIGS), ("scheduler", SCHEDULER_CONFIGS)):
        if "params" in file.get(section, {}):
            file[section].setdefault("type", draw(st.sampled_from([*types])))
    return file


def load_or_problems(file: dict[str, Any], **more: Any) -> LoadedConfig | None:
    """None if it was refused, with a message. Any other exception is passed on, and fails the test."""
    try:
        return load_config(file, **more)
    except ConfigError as error:
        whole = bool(error.problems) and all(problem.what and problem.path for problem in error.problems)
    assert whole
    return None


@settings(max_examples=200, deadline=None)
@given(files(fine=False) | files(fine=True), st.none() | st.integers(1, 8))
def test_known_keys_load_or_say_why_not(file: dict[str, Any], world_size: int | None) -> None:
    before = json.dumps(file)
    loaded = load_or_problems(file, world_size=world_size)
    if loaded is not None:
        config, notes = loaded
        assert all(notes)
        assert config == Config(**{name: getattr(config, name) for name in Config.model_fields})
        assert world_size is None or config == config.resolved(world_size)
    assert json.dumps(file) == before


@pytest.mark.medium
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON), max_size=5))
def test_anything_else_is_a_config_error_too(file: dict[str, Any]) -> None:
    load_or_problems(file)


ALONE = [key for key in TABLE if not key.section.startswith(("optimizer", "scheduler")) and not key.renamed]


@pytest.mark.quick(0)
@pytest.mark.parametrize("key", ALONE, ids=lambda key: key.path)
def test_each_key_alone(key: Key) -> None:
    """A fine value is no problem of its key, any value of another type is one."""

    @settings(max_examples=5, deadline=None, database=None)
    @given(fine_values_of(key))
    def fine(value: Any) -> None:
        file: dict[str, Any] = {}
        insert(file, key, value)
        assert not problems_at(file, key, but=("exclude", "must agree", "multiple", "states is fp32"))

    fine()
    file: dict[str, Any] = {}
    insert(file, key, object())
    assert problems_at(file, key)


def problems_at(file: dict[str, Any], key: Key, but: tuple[str, ...] = ()) -> list[str]:
    file = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, **file}
    try:
        load_config(file)
    except ConfigError as error:
        found = [problem.what for problem in error.problems if problem.path == key.path]
        return [what for what in found if not any(words in what for words in but)]
    return []


EXTREME = (-(2**64), -1e308, -(2**63), 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 1e300, 1e308, 10**308, 5e-324)


@pytest.mark.parametrize("value", [*EXTREME, 10**5000], ids=[*map("{:.4g}".format, EXTREME), "5000 digits"])
def test_extreme_numbers_load_or_say_why_not(value: float) -> None:
    for key in TABLE:
        for given_ in (value, [value]):
            file: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
            insert(file, key, given_)
            for section, types in (("optimizer", ("AdamW",)), ("scheduler", ("OneCycle",))):
                if section in file and key.name != "type":
                    file[section].setdefault("type", (key.of or types)[0])
            loaded = load_or_problems(file, world_size=2)
            wide = isinstance(value, int) and abs(value) >= 2**63
            if wide and loaded is not None and key.treatment is not Treatment.REFUSED:
                assert not getattr(key.kind, "whole", False), key.path


@pytest.mark.parametrize(
    "field, words",
    [
        ("threads", "at least 1 and at most 4096; it is more than"),
        ("cpu_set", r"it is more than 2\*\*63 - 1"),
        ("tile_numel", r"it is more than 2\*\*63 - 1"),
    ],
)
def test_integers_of_more_than_64_bits(field: str, words: str) -> None:
    value = [2**64] if field == "cpu_set" else 2**64
    for make in (
        lambda: Config(**{field: value}),
        lambda: load_config({"train_batch_size": 1, "longshore": {field: value}}),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def test_as_many_threads_as_the_host_kernels_take() -> None:
    assert Config(threads=MOST_HOST_THREADS).threads == MOST_HOST_THREADS
    with pytest.raises(ConfigError, match=r"at most 4096$"):
        Config(threads=MOST_HOST_THREADS + 1)


def rates_of(value: object) -> st.SearchStrategy[Any]:
    """Return a strategy for one parameter of a schedule, which is mostly legal."""
    if value == "warmup_type":
        return st.sampled_from(["log", "linear"])
    number = st.sampled_from([0, 1, 2, 3, 0.5, 0.99, 2**62, 2**63 - 1, 1e38, 1e308, 5e-324, 2**64, 10**308])
    return st.booleans() if value in ("cycle_momentum", "lr_range_test_staircase") else number


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from([*SCHEDULER_CONFIGS]))
    names = [name for name in SCHEDULER_CONFIGS[kind].model_fields if name != "type"]
    given_ = draw(st.lists(st.sampled_from(names), unique=True))
    return kind, {name: draw(rates_of(name)) for name in given_}


@settings(max_examples=200, deadline=None)
@given(schedules(), st.lists(st.sampled_from([0, 1, 2, 1000, 3999, 4000, 4001, 2**62, 2**63 - 1]), min_size=1))
def test_what_a_schedule_accepts_has_rates(schedule: tuple[str, dict[str, Any]], steps: Sequence[int]) -> None:
    kind, params = schedule
    try:
        config = SCHEDULER_CONFIGS[kind](**params)
    except ConfigError:
        return
    for count in steps:
        assert all(0 <= rate < math.inf for rate in config.lrs(count, [1e-3]))
        if params.get("decay_mom_rate", 0) == 0:  # which may drive betas out of their range
            assert all(0 <= beta < 1 for pair in config.betas(count, 1) or () for beta in pair)


REFUSED = [key for key in TABLE if key.treatment is Treatment.REFUSED and not isinstance(key.kind, Block)]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(REFUSED), st.data())
def test_refused_keys_say_what_to_do(key: Key, data: st.DataObject) -> None:
    value = data.draw(values_of(key.kind))
    file: dict[str, Any] = {}
    insert(file, key, value)
    for section, types in (("optimizer", ("Adagrad",)), ("scheduler", ("WarmupLR",))):
        if key.section == f"{section}.params":
            file[section]["type"] = (key.of or types)[0]
    said = problems_at(file, key)
    assert said == ([] if key.is_harmless(key.kind.check(value)) else [f"is not supported: {key.what}"])


@pytest.mark.medium
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TABLE), st.data())
def test_one_edit_is_recognized(key: Key, data: st.DataObject) -> None:
    name, letters = key.name, "abcdefghijklmnopqrstuvwxyz_0123456789"
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(letters))
    before, after = name[:at], name[at + 1 :]
    typed = data.draw(
        st.sampled_from(
            [
                before + after,
                before + letter + name[at] + after,
                before + letter + after,
                before + after[:1] + name[at] + after[1:],
            ]
        )
    )
    if typed in names_in(key.section) or not typed:
        return
    assert edits(typed, name) == 1
    said = unknown(key.section, typed)
    assert f'"{name}"' in said.partition("did you mean")[2] or f"the key is {name}" in said, said
