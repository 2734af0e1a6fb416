"""Old names go on working, warn where they are used, and are gone in the version that was announced."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.version import Version

import longshore
from longshore import deprecation
from longshore.deprecation import deprecated_argument, deprecated_function

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "longshore"
DECORATORS = (deprecated_argument.__name__, deprecated_function.__name__)
VERSIONS = {"since": "0.2", "removed_in": "0.4"}


@deprecated_argument("bucket_size", "bucket_numel", since="0.2", removed_in="0.4")
def buckets(model: str, bucket_numel: int = 1, *, pad: bool = False) -> tuple[str, int, bool]:
    """Return the arguments."""
    return model, bucket_numel, pad


class Optimizer:
    @deprecated_argument("learning_rate", "lr", since="0.2", removed_in="0.4")
    @deprecated_argument("decay", "weight_decay", since="0.2", removed_in="0.5")
    def __init__(self, lr: float = 1.0, weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay = lr, weight_decay

    @deprecated_function("host_bytes()", since="0.2", removed_in="0.4")
    def bytes_on_host(self, scale: int = 1) -> int:
        return 7 * scale


# In a call that the type checker would refuse, the function is Any.
OLD_BUCKETS: Any = buckets
OLD_OPTIMIZER: Any = Optimizer


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_warned", set())


def test_the_old_name_gives_the_new_argument() -> None:
    with pytest.warns(FutureWarning, match=r"^buckets\(bucket_size=...\) is .* use bucket_numel=; 0.4 removes it$"):
        assert OLD_BUCKETS("m", bucket_size=5, pad=True) == ("m", 5, True)
    assert buckets("m", 5) == buckets("m", bucket_numel=5) == ("m", 5, False)


def test_several_names_of_one_constructor() -> None:
    with pytest.warns(FutureWarning) as caught:
        made = OLD_OPTIMIZER(learning_rate=0.5, decay=0.25)
    assert (made.lr, made.weight_decay) == (0.5, 0.25)
    assert [str(each.message).partition(" is")[0] for each in caught] == [
        "Optimizer(learning_rate=...)",
        "Optimizer(decay=...)",
    ]


def test_a_function_goes_on_working() -> None:
    with pytest.warns(FutureWarning, match=r"^Optimizer.bytes_on_host\(\) .* use host_bytes\(\); 0.4 removes it$"):
        assert Optimizer().bytes_on_host(2) == 14


@pytest.mark.parametrize("arguments", [("m", 1), ("m",)])
def test_both_names_are_refused(arguments: tuple[Any, ...]) -> None:
    named = {} if len(arguments) == 2 else {"bucket_numel": 1}
    with pytest.raises(TypeError, match=r"buckets\(\) got 'bucket_numel' and 'bucket_size'"):
        OLD_BUCKETS(*arguments, bucket_size=1, **named)


def test_an_unknown_name_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="bucket_bytes"):
        OLD_BUCKETS("m", bucket_bytes=1)


def test_each_line_that_calls_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            OLD_BUCKETS("m", bucket_size=1)
        OLD_BUCKETS("m", bucket_size=1)
    line = inspect.currentframe().f_lineno - 1  # pyright: ignore[reportOptionalMemberAccess]
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line - 1), (__file__, line)]


def test_longshores_own_lines_are_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of longshore between the program and the deprecated name is no caller."""
    inner: dict[str, Any] = {"__name__": "longshore.optim.elsewhere", "buckets": OLD_BUCKETS}
    exec("def pass_on():\n    return buckets('m', bucket_size=1)", inner)
    with pytest.warns(FutureWarning) as caught:
        inner["pass_on"]()
    assert caught[0].filename == __file__


def test_a_warning_that_is_an_error_is_one_each_time() -> None:
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            with pytest.raises(FutureWarning):
                OLD_BUCKETS("m", bucket_size=1)


def test_the_signature_is_that_of_the_new_names() -> None:
    assert list(inspect.signature(Optimizer).parameters) == ["lr", "weight_decay"]
    assert buckets.__doc__ == "Return the arguments."
    assert vars(Optimizer.__init__)["deprecated_names"] == {
        "learning_rate": "lr until 0.4",
        "decay": "weight_decay until 0.5",
    }
    assert vars(Optimizer.bytes_on_host)["deprecated_names"] == {"bytes_on_host": "host_bytes() until 0.4"}


@pytest.mark.parametrize("names", [("old", "missing"), ("model", "bucket_numel")])
def test_names_that_the_function_does_not_have(names: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match="has to have"):
        deprecated_argument(*names, **VERSIONS)(buckets)


# -- every deprecation of the source ------------------------------------------


class Deprecation(NamedTuple):
    """A use of one of the decorators.

    Attributes:
        where: file and line.
        since, removed_in: as it says; None if that is no literal text.
    """

    where: str
    since: str | None
    removed_in: str | None


def deprecations_in(folder: Path) -> Iterator[Deprecation]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _called(node) in DECORATORS:
                said = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
                where = f"{path.relative_to(folder)}:{node.lineno}"
                yield Deprecation(where, said.get("since"), said.get("removed_in"))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def wrong(found: Iterator[Deprecation], version: str) -> list[str]:
    """What is wrong with deprecations where longshore has this version; docs/stability.md has the rules."""
    problems = []
    for where, since, removed_in in found:
        if since is None or removed_in is None:
            problems.append(f"{where}: give since= and removed_in= as literals")
            continue
        begun, over = (Version(each).release[:2] for each in (since, removed_in))
        if over[0] == begun[0] and over[1] < begun[1] + 2:
            problems.append(f"{where}: {since} to {removed_in} is less than two minor versions")
        if Version(version).release[:2] >= over:
            problems.append(f"{where}: this is {version}, so remove what was to be removed in {removed_in}")
    return problems


@pytest.mark.medium
def test_nothing_is_kept_longer_or_shorter_than_announced() -> None:
    assert wrong(deprecations_in(SOURCE), longshore.__version__) == []


def test_the_version_is_one_number() -> None:
    """The check above reads that of the package, and releases have that of pyproject.toml."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert f'version = "{longshore.__version__}"' in lines


@pytest.mark.parametrize(
    "version, versions, message",
    [
        ("0.3.9", 'since="0.2", removed_in="0.4"', None),
        ("0.4.0", 'since="0.2", removed_in="0.4"', "this is 0.4.0, so remove"),
        ("0.4.0.dev1", 'since="0.2", removed_in="0.4"', "this is 0.4.0.dev1, so remove"),
        ("0.2.0", 'since="0.2.0", removed_in="0.3"', "less than two minor versions"),
        ("0.9.0", 'since="0.9", removed_in="1.0"', None),
        ("0.2.0", "since=VERSION, removed_in='0.4'", "as literals"),
    ],
)
def test_the_check_itself(version: str, versions: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    text = f'\n@deprecation.deprecated_argument("a", "b", {versions})\ndef f(b): ...\n'
    (tmp_path / "engine" / "a.py").write_text(text)
    found = wrong(deprecations_in(tmp_path), version)
    assert [each.partition(": ")[0] for each in found] == ["engine/a.py:2"] * (message is not None)
    assert message is None or message in found[0]
