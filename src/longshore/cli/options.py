"""Command-line options from the annotated fields of dataclasses.

A field ``steps: Annotated[int, Option("Optimizer steps.", at_least=1)] = 500`` is the option ``--steps``. The field
states its name, type, default, help and bounds, once: :func:`takes` gives them to typer, and
:class:`CommandSettings` applies the bounds to every instance, whether a command line or Python made it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from longshore.cli.terminal import SettingsError

T = TypeVar("T")

_METAVAR_LETTERS = 14
_MOST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line.

    Attributes:
        help: the text of ``--help`` about it.
        panel: the heading under which ``--help`` lists it.
        flag: the option's name, if it differs from the field's: ``--data``, or ``--offload/--no-offload``.
        at_least, at_most: inclusive bounds of a number; an integer has at most 64 bits in any case. A bounded float
            also has to be finite.
        multiple_of: a divisor of the number.
        choices: the texts that are accepted.
        parse: makes the value from the text; the message of its ``ValueError`` is shown after the option's name.
        metavar: the word of ``--help`` in place of the type.
    """

    help: str
    panel: str | None = None
    flag: str | None = None
    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None


class OptionField(NamedTuple):
    """A field of a dataclass that is an option; ``kind`` is its type."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The name that errors use: ``--seq-len``; for a pair, the first name."""
        return (self.option.flag or f"--{self.name.replace('_', '-')}").partition("/")[0]

    def parameter(self) -> inspect.Parameter:
        """Return the parameter from which typer makes the option."""
        option, kind, default = self.option, self.kind, self.default
        if get_origin(kind) is tuple:  # the option is repeatable
            kind, default = list[get_args(kind)[0]] | None, None
        elif option.parse is not None:
            kind, default = str | None, None if default is None else str(default)
        metavar, text = option.metavar, option.help
        if option.choices:
            joined = "|".join(option.choices)
            # A longer metavar would leave no room for the help text.
            is_short = len(joined) <= _METAVAR_LETTERS
            metavar = f"<{joined}>" if is_short else "<name>"
            text = text if is_short else f"{text} One of {', '.join(option.choices)}."
        # The name is always given: without it typer adds a --no-... to every flag.
        names = option.flag or self.flag
        given: Any = typer.Option(names, help=text, rich_help_panel=option.panel, metavar=metavar)
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=default, annotation=Annotated[kind, given])

    def value(self, given: Any) -> Any:
        """Return the field's value, from the one that typer read."""
        if get_origin(self.kind) is tuple:
            return tuple(given or ())
        if self.option.parse is None or given is None:
            return given
        try:
            return self.option.parse(given)
        except ValueError as error:
            raise SettingsError(f"{self.flag} {error}") from error

    def check(self, value: Any) -> None:
        """Raise SettingsError unless the value is within the option's bounds."""
        option, flag = self.option, self.flag
        if value is None:
            return
        if option.choices and value not in option.choices:
            near = difflib.get_close_matches(value, option.choices, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingsError(f"{flag} {value!r} is not known; {hint}choose from {', '.join(option.choices)}")
        if isinstance(value, float) and option.at_least is not None and not math.isfinite(value):
            raise SettingsError(f"{flag} must be a finite number, not {value}")
        if option.at_least is not None and value < option.at_least:
            raise SettingsError(f"{flag} must be at least {option.at_least}, not {value}")
        most = _MOST_INTEGER if option.at_most is None and isinstance(value, int) else option.at_most
        if most is not None and value > most:
            raise SettingsError(f"{flag} must be at most {most}, not {value}")
        if option.multiple_of > 1 and value % option.multiple_of:
            raise SettingsError(f"{flag} must be a multiple of {option.multiple_of}, not {value}")


class CommandLine(NamedTuple):
    """The options of one command, from which :meth:`settings` makes the dataclasses that describe them."""

    values: Mapping[str, Any]
    """All values by field name, including defaults."""
    given: Mapping[str, Any]
    """The values that the user gave, by field name."""

    def settings(self, kind: type[T], **others: Any) -> T:
        """Return a ``kind`` with the values of its options; ``others`` are its other fields."""
        return kind(**{field.name: self.values[field.name] for field in option_fields(kind)}, **others)

    def flags_given(self, kind: type) -> list[str]:
        """Return those of ``kind``'s options that the user gave, as they are written."""
        return [field.flag for field in option_fields(kind) if field.name in self.given]


def option_fields(kind: type) -> Iterator[OptionField]:
    """Return the fields of a dataclass that are annotated with an :class:`Option`."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        option = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)), None)
        if option is not None:
            yield OptionField(field.name, get_args(hint)[0], field.default, option)


@dataclass(frozen=True)
class CommandSettings:
    """A dataclass with options, which are checked when it is made.

    Raises:
        SettingsError: a value is out of its bounds; the message names the option.
    """

    def __post_init__(self) -> None:
        for field in option_fields(type(self)):
            field.check(getattr(self, field.name))


def takes(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a typer command so that it takes the options of ``kinds``, as a :class:`CommandLine`.

    The command's first parameter is that object. Its others remain parameters of the command line.
    """
    fields = [field for kind in kinds for field in option_fields(kind)]
    names = [field.name for field in fields]
    assert len(set(names)) == len(names), f"two options have the same name: {sorted(names)}"

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in names}
            read = {field.name: field.value(values.pop(field.name)) for field in fields}
            given = {name: read[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
            command(CommandLine(read, given), **values)

        context, *_ = inspect.signature(run, eval_str=True).parameters.values()
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        parameters = [context, *keywords, *(field.parameter() for field in fields)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return run

    return decorate
