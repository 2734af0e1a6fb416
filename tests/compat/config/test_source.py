"""Files that are no configuration."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from longshore.compat.config.reading import read_file
from longshore.engine.config import Config, ConfigError, load_config


@pytest.mark.parametrize(
    "content, what",
    [
        (b'{"a": 1 2}', "line 1, column 9"),
        (b'{\n  "a": 1\n  "b": 2}', "at line 3, column 3 it is not: Expecting ',' delimiter"),
        (b'{ // hello\n "a": }', "line 2, column 7"),
        (b'{"a": 1 /* no end }', "line 1, column 9"),
        (b'{"a": "text // with no end }', "line 1, column 7"),
        (b"", "line 1, column 1"),
        (b"[1]", "must be a JSON object, in braces, and is [1]"),
        (b"null", "and is null"),
        (b"1.5", "and is 1.5"),
        (b'"text"', 'and is "text"'),
        (b"true", "and is true"),
        (b'{"gradient_clipping": NaN}', "NaN is not a number in JSON"),
        (b'{"a": [-' + b"9" * 5000 + b"]}", "-9999999999999999999... is an integer of 5000 digits"),
        (b'{"gradient_clipping": -Infinity}', "-Infinity is not a number in JSON"),
        (b'{"a": 1, "b": {"c": [{"d": 1, "d": 2}]}, "a": 3}', "a: is given more than once; keep one"),
        (b'{"b": {"c": [{"d": 1, "d": 2}]}}', "b.c.0.d: is given more than once"),
        (b'{"a": "\xff"}', "must be UTF-8 text, and byte 7 is not"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "is an integer of 10000 digits, and no key may be more than 2**63 - 1"),
        (b'{"gradient_clipping": 1e999, "train_batch_size": 1}', "must be a number of at least 0"),
        (b'{"a": ' * 900 + b"1" + b"}" * 900, "is not a key of the file's top level"),
    ],
    ids=range(21),
)
def test_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path} has ")
    assert what in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="is a folder; give the path of the file in it"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "config.json"
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is a pipe or a device; write its content to a file"):
        load_config(path)


@pytest.mark.parametrize(
    "content, what",
    [
        ("/* " * 3_300_000, "is too large to be a configuration: it has more than 1048576 bytes"),
        ("/* " * 340_000, "line 1, column 1 it is not"),
        ('"\\' * 340_000, "line 1, column 1 it is not"),
        ("{" + ",".join(f'"a{number % 30_000}": 1' for number in range(60_000)) + "}", "a0: is given more than once"),
        (json.dumps({"k" * 1_000_000: 1}), f'kkk... = 1: "{"k" * 57}..." is not a key of the file'),
        (json.dumps({"zero_optimization": {"k" * 1_000_000: 1}}), "kkk... = 1: "),
        (json.dumps({"optimizer": {"type": "k" * 1_000_000}}), 'kkk...: must be one of "Ada'),
        (json.dumps({f"key_{number}": 1 for number in range(50_000)}), "has 50001 problems"),
    ],
    ids=["large", "comments", "escapes", "repeated", "key", "inner key", "value", "keys"],
)
def test_large_files_are_refused_at_once(tmp_path: Path, content: str, what: str) -> None:
    """Each of these took from seconds to hours, where a search began again at each letter."""
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert what in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_the_first_unknown_keys_are_compared_with_the_known_ones() -> None:
    file: dict[str, Any] = {f"train_batch_sizes{number}": 1 for number in range(1000)}
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, **file})
    found = [problem.what for problem in caught.value.problems]
    assert len(found) == 1000
    assert ["did you mean" in what for what in found] == [number < 20 for number in range(1000)]
    assert str(caught.value).splitlines()[-1] == "  and 900 more"


def test_a_long_field_is_no_other_name() -> None:
    with pytest.raises(ConfigError, match=r"kkk\.\.\. = 1: is not a field of Config$"):
        Config(**{"k" * 1_000_000: 1})


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 1}')
    assert load_config(path).config.train_batch_size == 1


COMMENTED = r"""{ // "train_batch_size": 2,
    "train_batch_size": 1, /* one,
    two */ "steps_per_print": 3, # and more
    "wandb": {"enabled": false, "project": "a // b /* c */ # d, ]\" // e",},
}
"""


def test_comments_are_read_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(COMMENTED)
    with pytest.warns(UserWarning, match=r"config\.json has a comment, or a comma too many, at line 1; .* reads over"):
        data = read_file(path)
    project = 'a // b /* c */ # d, ]" // e'
    expected = {"train_batch_size": 1, "steps_per_print": 3, "wandb": {"enabled": False, "project": project}}
    assert data == expected
    path.write_text('{\n"train_batch_size": 1,\n}')
    with pytest.warns(UserWarning, match="at line 2"):
        assert load_config(path).config.train_batch_size == 1
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_file(path) == {"train_batch_size": 1}


def test_a_file_without_comments_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 1, "wandb": {"enabled": false, "project": "http://x, ]"}}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_file(path)["wandb"]["project"] == "http://x, ]"
