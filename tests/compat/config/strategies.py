"""Values that a kind allows, and files made of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from longshore.compat.config.keys import Key, Treatment
from longshore.compat.config.kinds import Block
from longshore.engine.config.values import (
    Budget,
    Either,
    Exactly,
    Infinite,
    Items,
    Kind,
    Number,
    OneOf,
    Splits,
)

LARGE = 10**12


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Any legal value, in any of the spellings that are legal."""
    if isinstance(kind, Exactly):
        sections = st.dictionaries(st.text(max_size=5), st.booleans(), max_size=2)
        return {bool: st.booleans(), str: st.text(max_size=5)}.get(kind.of, sections)
    if isinstance(kind, Number) and kind.whole:
        assert kind.above is None and kind.below is None
        low = -LARGE if kind.minimum is None else int(kind.minimum)
        whole = st.integers(low, LARGE if kind.maximum is None else int(kind.maximum))
        return whole | whole.map(float)
    if isinstance(kind, Number):
        return st.floats(
            max(bound for bound in (kind.minimum, kind.above, -1e12) if bound is not None),
            min(bound for bound in (kind.maximum, kind.below, 1e12) if bound is not None),
            exclude_min=kind.above is not None,
            exclude_max=kind.below is not None,
        )
    if isinstance(kind, OneOf):
        aliases = [name for name, option in kind.aliases.items() if option in kind.options]
        return st.sampled_from([*kind.options, *aliases]).flatmap(_in_any_case)
    if isinstance(kind, Budget):
        sizes = st.sampled_from(["auto", "Auto", "25%", "100 %", "8GiB", "1.5e9 B", 0])
        return sizes | st.integers(1024, LARGE)
    if isinstance(kind, Items):
        return st.lists(values_of(kind.of), min_size=kind.count or 0, max_size=kind.count or 3)
    if isinstance(kind, Either):
        return st.one_of([values_of(one) for one in kind.kinds])
    if isinstance(kind, Splits):
        blocks = st.integers(1, 9) | st.lists(st.integers(1, 9), max_size=3) | st.just("stack") | st.none()
        alone = blocks | st.fixed_dictionaries({"split": blocks}, optional={"split_dim": st.sampled_from([0, 1])})
        return st.dictionaries(st.text(max_size=5), alone, max_size=2)
    if isinstance(kind, Infinite):
        return st.just(float("inf"))
    assert isinstance(kind, Block), kind
    return st.just({}) | st.just({"enabled": False}) | st.just({"enabled": True}) | st.just({"a": 1}) | st.booleans()


def _in_any_case(option: str | int) -> st.SearchStrategy[str | int]:
    if isinstance(option, str):
        return st.sampled_from([option, option.lower(), option.upper()])
    return st.just(option)


def fine_values_of(key: Key) -> st.SearchStrategy[Any]:
    """Values of a key that loads them: for a refused key, those that switch it off."""
    if key.treatment is not Treatment.REFUSED:
        # The word of Transformers and Accelerate for a value that they fill in; any text may be it.
        return values_of(key.kind).filter(lambda value: value != "auto")
    if isinstance(key.kind, Block):
        return st.none() | st.just(False) | st.just({})
    return st.sampled_from(key.harmless) if key.harmless else st.none()


def insert(file: dict[str, Any], key: Key, value: Any) -> None:
    """Put a value at the key's path."""
    place = file
    for name in key.section.split(".") if key.section else []:
        place = place.setdefault(name, {})
    place[key.name] = value
