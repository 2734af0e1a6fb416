"""Options made from dataclass fields: what typer is told, which values they get, and what their bounds refuse."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from longshore.cli.options import CommandLine, CommandSettings, Option, option_fields, takes
from longshore.cli.terminal import SettingsError


def even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"{text} is odd")
    return int(text)


@dataclass(frozen=True)
class Numbers(CommandSettings):
    count: Annotated[int, Option("How many.", at_least=1, at_most=9)] = 3
    rate: Annotated[float | None, Option("How fast.", at_least=0)] = None
    width: Annotated[int, Option("How wide.", at_least=4, multiple_of=4)] = 8
    other: int = 5


@dataclass(frozen=True)
class Words(CommandSettings):
    paths: Annotated[tuple[Path, ...], Option("Files.", flag="--data")] = ()
    kind: Annotated[str, Option("Which.", "Kinds", choices=("one", "two", "three"))] = "one"
    size: Annotated[int, Option("How large.", parse=even, metavar="<size>")] = 2
    loud: Annotated[bool, Option("Shout.")] = False
    near: Annotated[bool, Option("Close by.", flag="--near/--far")] = True


@pytest.fixture
def read():
    """Runs a command that takes both, and returns what it got."""
    seen = []

    @takes(Numbers, Words)
    def command(line: CommandLine, name: Annotated[str, typer.Argument()] = "none") -> None:
        """The help."""
        seen.append((line, name))

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    parser = typer.main.get_command(app)

    def run(*arguments: str) -> tuple[CommandLine, str]:
        with parser.make_context("command", list(arguments)) as context:
            parser.invoke(context)
        return seen.pop()

    run.help = lambda: parser.get_help(parser.make_context("command", [], resilient_parsing=True))
    return run


def test_defaults(read):
    line, name = read()
    assert (line.settings(Numbers), line.settings(Words), name) == (Numbers(), Words(), "none")
    assert line.given == {} and line.flags_given(Words) == []


def test_values(read):
    line, name = read(
        "--count", "4", "me", "--rate", "0.5", "--data", "a", "--data", "b", "--size", "6", "--loud", "--far"
    )
    assert name == "me"
    assert line.settings(Numbers, other=6) == Numbers(4, 0.5, other=6)
    assert line.settings(Words) == Words((Path("a"), Path("b")), size=6, loud=True, near=False)
    assert line.given == {
        "count": 4, "rate": 0.5, "paths": (Path("a"), Path("b")), "size": 6, "loud": True, "near": False,
    }  # fmt: skip
    assert line.flags_given(Words) == ["--data", "--size", "--loud", "--near"]


def test_a_default_that_is_given_is_given(read):
    assert read("--count", "3", "--near")[0].given == {"count": 3, "near": True}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--count", "0"], "--count must be at least 1, not 0"),
        (["--count", "10"], "--count must be at most 9, not 10"),
        (["--rate", "nan"], "--rate must be a finite number, not nan"),
        (["--rate", "inf"], "--rate must be a finite number, not inf"),
        (["--rate", "-1"], "--rate must be at least 0, not -1.0"),
        (["--width", "0"], "--width must be at least 4, not 0"),
        (["--width", "6"], "--width must be a multiple of 4, not 6"),
    ],
    ids=" ".join,
)
def test_bounds(read, arguments, message):
    line, _ = read(*arguments)
    with pytest.raises(SettingsError, match=f"^{message}$"):
        line.settings(Numbers)
    name = arguments[0].removeprefix("--")
    with pytest.raises(SettingsError, match=f"^{message}$"):
        Numbers(**{name: line.given[name]})
    with pytest.raises(SettingsError, match=f"^{message}$"):
        dataclasses.replace(Numbers(), **{name: line.given[name]})


def test_what_cannot_be_parsed(read):
    with pytest.raises(SettingsError, match=r"^--size 3 is odd$"):
        read("--size", "3")
    with pytest.raises(
        SettingsError, match=r"^--kind 'tow' is not known; did you mean two. choose from one, two, three$"
    ):
        Words(kind="tow")


def test_no_flag_has_an_opposite_unless_it_says_so(read):
    for wrong in ("--no-loud", "--no-near", "--paths"):
        with pytest.raises(Exception, match="No such option"):
            read(wrong)


def test_only_annotated_fields_are_options(read):
    assert [field.flag for field in option_fields(Numbers)] == ["--count", "--rate", "--width"]
    with pytest.raises(Exception, match="No such option"):
        read("--other", "1")


def test_two_options_of_one_name():
    with pytest.raises(AssertionError, match="count"):
        takes(Numbers, Numbers)
