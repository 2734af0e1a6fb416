"""``docs/public_api.txt``: every name that longshore promises to keep, as docs/stability.md says.

``python -m scripts.docs.public_api`` writes the file and prints what changed; with ``--check`` it only prints. The file
is not among those that ``python -m scripts.docs`` writes, so that no name leaves the list unnoticed.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from longshore.engine.engine import Answer
from scripts.docs.docstrings import attributes_of
from scripts.docs.public_changes import changes, sections_of

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "public_api.txt"

INTRODUCTION = """\
# Every name that longshore promises to keep; stability.md says what the promise is.
# Written by python -m scripts.docs.public_api, compared with the package by tests/docs/test_public_api.py.
# Parameters are in parentheses, and "=..." stands for a default. An attribute may be a property.
"""

MODULES = ("longshore.checkpointing", "longshore.utils", "longshore.engine.config")
"""Modules beside ``longshore`` from which users import, and which need no optional package."""

INTEGRATIONS = ("transformers", "lightning")
"""Modules of ``longshore.integrations``, each of which needs the package of its name."""

NOT_CONSTRUCTED = ("Engine", "Stream", "TiledOptimizer", "TrainingLoader")
"""Classes whose instances longshore makes: the arguments of their constructors are not public."""

NOT_PUBLIC = {"Engine": ("binding", "built", "loss_scaling", "ranks")}
"""Attributes without an underscore that are not for users, by class: other modules of longshore read them."""

BESIDE_THE_REFERENCE: Mapping[str, Sequence[str]] = {
    "FabricLongshoreStrategy": (),
    "LongshoreStrategy": ("engine", "grad_norm"),  # docs/lightning.md
    "TiledOptimizer": ("cur_scale", "dynamic_loss_scale", "loss_scale", "overflow"),  # docs/from_deepspeed.md
    "Trainer": ("engine",),  # docs/transformers.md
    "TrainerMixin": ("engine",),
}
"""Members by class that a guide describes and docs/reference does not list. Other methods of the integrations are hooks
of their base classes, which other packages define."""

PROTOCOLS = ("__call__", "__enter__", "__getitem__", "__iter__", "__len__", "__next__")

PARTS_OF_THE_ENGINE = {"save": "save_checkpoint", "load": "load_checkpoint", "wait": "wait_for_checkpoint"}
"""Names of the engine for methods of ``Checkpoints``."""


def sections() -> dict[str, dict[str, str]]:
    """Return, by title and name, what stands after each public name; a section is empty if its package is missing."""
    results = Listing()
    for kind in _results():
        results.first_names[kind] = kind.__name__
        results.members(kind.__name__, kind)
    main = Listing(results.first_names)
    for name in ("longshore", *MODULES):
        main.module(name)
    for kind in _of("longshore.engine.config.optimizers", "OPTIMIZER_CONFIGS"):
        main.add(f"longshore.engine.config.{kind}Config", _of("longshore.engine.config", f"{kind}Config"))
    main.add("longshore.__version__", _of("longshore", "__version__"))
    compat = Listing(main.first_names)
    for path in sorted(_of("longshore.compat.names", "PROVIDED")):
        compat.module(f"longshore.compat.deepspeed.{path}".removesuffix("."))
    found = {"Python": main.entries, "Results": results.entries, "DeepSpeed's names": compat.entries}
    for package in INTEGRATIONS:
        integration = Listing(main.first_names)
        if importlib.util.find_spec(package) is not None:
            integration.module(f"longshore.integrations.{package}")
        found[f"With the package {package}"] = integration.entries
    return {**found, "Command line": _commands(), "Configuration file": _keys(), "Environment": _variables()}


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "longshore"


class Listing:
    """The names of one section.

    Attributes:
        entries: what stands after each name.
        first_names: the first name of each class and function, in this and earlier sections.
    """

    def __init__(self, first_names: Mapping[Any, str] | None = None) -> None:
        self.entries: dict[str, str] = {}
        self.first_names = dict(first_names or {})

    def module(self, name: str) -> None:
        """Add a module with the names in its ``__all__``."""
        self.entries[name] = "  module"
        module = importlib.import_module(name)
        for each in module.__all__:
            if not inspect.ismodule(value := getattr(module, each)):
                self.add(f"{name}.{each}", value)

    def add(self, name: str, value: Any) -> None:
        """Add a name. If the value has an earlier one, it is an alias of that.

        Values and other packages' functions, which have signatures of their own, are listed by their names alone.
        """
        is_function = inspect.isroutine(value) or hasattr(value, "__wrapped__")
        if not _is_ours(value) or not (inspect.isclass(value) or is_function):
            self.entries[name] = ""
        elif value in self.first_names:
            self.entries[name] = f"  = {self.first_names[value]}"
        elif inspect.isclass(value):
            self.entries[name] = f"{_constructor(value)}  class{self._bases(value)}{_deprecated(value.__init__)}"
            self.members(name, value)
            self.first_names[value] = name
        else:
            self.first_names[value] = name
            self.entries[name] = _call(value)

    def members(self, name: str, kind: type) -> None:
        """Add the members of a class but those of bases that have a name of their own."""
        listed = [each for each in kind.__mro__[1:] if each in self.first_names]
        for each in _members(kind, listed):
            self.entries[f"{name}.{each}"] = _member(kind, each)
        if kind is _of("longshore", "Engine"):
            (checkpoints,) = (each for each in reference() if each.__name__ == "Checkpoints")
            for each, here in PARTS_OF_THE_ENGINE.items():
                self.entries[f"{name}.{here}"] = _member(checkpoints, each)

    def _bases(self, kind: type) -> str:
        """Return the classes as whose instances programs may know it: those with a name, and other packages'."""
        foreign = {base for each in kind.__mro__ if _is_ours(each) for base in each.__bases__ if not _is_ours(base)}
        without = ("object", "Generic", "Protocol", "ABC", "AbstractContextManager")
        bases = [each for each in kind.__mro__[1:] if each in foreign or each in self.first_names or each in _public()]
        names = [each.__qualname__ for each in bases if each.__qualname__ not in without]
        return f" of {', '.join(names)}" if names else ""


# -- what docs/reference shows -------------------------------------------------


@cache
def reference() -> Mapping[type, Sequence[str] | None]:
    """Return the classes of docs/reference with the members that a page selects; None: all."""
    found: dict[type, Sequence[str] | None] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for block in re.split(r"^::: ", page.read_text(), flags=re.MULTILINE)[1:]:
            path, _, options = block.partition("\n")
            module, _, name = path.strip().rpartition(".")
            chosen = re.search(r"^ +members:(.*\n(?: +- .*\n?)*)", options, re.MULTILINE)
            if inspect.isclass(value := _of(module, name)):
                found[value] = None if chosen is None else re.findall(r"\w+", chosen[1].replace("false", ""))
    return found


@cache
def _public() -> frozenset[Any]:
    """Return the classes that users import."""
    modules = [importlib.import_module(name) for name in ("longshore", *MODULES)]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    return frozenset(value for value in values if inspect.isclass(value))


def _results() -> list[type]:
    """Return the classes of docs/reference that users do not import; parts of the engine are listed as the engine's."""
    engine = _of("longshore", "Engine")
    of_engine = [each for each in reference() if each.__name__ == "Checkpoints" or each in engine.__mro__]
    found = [each for each in reference() if each not in _public() and each not in of_engine]
    return sorted(found, key=lambda each: each.__name__)


# -- one class -----------------------------------------------------------------


def _members(kind: type, listed: Collection[type] = ()) -> list[str]:
    """Return the names of a class's public methods and attributes, but for those of the classes ``listed``."""
    found: set[str] = set()
    for base in kind.__mro__:
        elsewhere = any(issubclass(each, base) for each in listed)
        if not _is_ours(base) or elsewhere or (base is not kind and base not in reference()):
            continue
        chosen = BESIDE_THE_REFERENCE.get(base.__name__)
        if (shown := reference().get(base)) is not None:
            chosen = (*(chosen or ()), *shown)
        if chosen is None and not hasattr(base, "model_fields"):
            chosen = (*_defined(base), *_assigned(base))
        found |= {*_fields(base), *_documented(base), *(chosen or ())}
    hidden = NOT_PUBLIC.get(kind.__name__, ())
    shown = {each for each in found if not each.startswith("_") and each not in hidden}
    return sorted(shown | {each for each in PROTOCOLS if each in vars(kind)})


def _fields(kind: Any) -> Iterable[str]:
    """Return the names of the values that a value class has."""
    if issubclass(kind, enum.Enum):
        return [each.name for each in kind]
    if "__dataclass_fields__" in vars(kind):
        return [each.name for each in dataclasses.fields(kind)]
    return [*getattr(kind, "model_fields", ()), *getattr(kind, "_fields", ())]


def _documented(kind: type) -> Iterable[str]:
    return [name.strip() for names in attributes_of(kind) for name in names.split(",")]


def _defined(kind: type) -> Iterable[str]:
    """Return the names of methods and properties; other attributes of a class are constants of its own."""
    methods = (property, staticmethod, classmethod, Answer)
    return [
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) or isinstance(value, methods) or hasattr(value, "attrname")  # cached_property
    ]


def _assigned(kind: type) -> Iterator[str]:
    """Yield the names of the attributes that the constructor assigns."""
    if not inspect.isfunction(build := vars(kind).get("__init__")) or "__dataclass_fields__" in vars(kind):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(build))))):
        for target in [*getattr(node, "targets", ()), getattr(node, "target", None)]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr


def _member(kind: type, name: str) -> str:
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, (staticmethod, classmethod)):
        return _call(getattr(kind, name))
    return _call(value, first=1) if inspect.isfunction(value) else "  attribute"


# -- signatures ----------------------------------------------------------------


def _constructor(kind: Any) -> str:
    if kind.__name__ in NOT_CONSTRUCTED or issubclass(kind, (BaseException, enum.Enum)):
        return ""
    if hasattr(kind, "model_fields"):
        fields = kind.model_fields.items()
        return f"({', '.join(['*', *(name if each.is_required() else f'{name}=...' for name, each in fields)])})"
    for base in kind.__mro__:  # inspect.signature(kind) depends on the version of Python where both are defined
        for name in ("__init__", "__new__"):
            if _is_ours(base) and name in vars(base):
                return _parameters(getattr(base, name), first=1)
    return ""


def _call(function: Any, first: int = 0) -> str:
    return f"{_parameters(function, first)}{_deprecated(function)}"


def _parameters(function: Any, first: int) -> str:
    """Return the parameters from number ``first`` on, without annotations."""
    short = []
    for each in list(inspect.signature(function).parameters.values())[first:]:
        default = each.empty if each.default is each.empty else ...
        short.append(each.replace(annotation=each.empty, default=default))
    return str(inspect.Signature(short)).replace("=Ellipsis", "=...")


def _deprecated(function: Any) -> str:
    """Return the old names of parameters, and of the function, that :mod:`longshore.deprecation` still accepts."""
    old = getattr(function, "deprecated_names", {})
    return f"  deprecated: {', '.join(f'{name} for {note}' for name, note in sorted(old.items()))}" if old else ""


# -- what is not Python --------------------------------------------------------


def _commands() -> dict[str, str]:
    """Return the commands and their options; those of ``launch``, which torchrun's parser reads, as far as ours."""
    import typer

    found = {}
    group: Any = typer.main.get_command(_of("longshore.cli", "app"))
    commands = [("longshore", group), *((f"longshore {name}", each) for name, each in group.commands.items())]
    for words, command in commands:
        if command.hidden:
            continue
        found[words] = "  command"
        for each in command.params:
            count = "values" if each.nargs != 1 or getattr(each, "multiple", False) else "value"
            takes = "flag" if getattr(each, "is_flag", False) else f"{'required ' * each.required}{count}"
            if each.param_type_name == "argument":
                found[f"{words} {each.name.upper()}"] = f"  argument: {takes}"
            elif not each.hidden and "--help" not in each.opts:
                found |= {f"{words} {option}": f"  {takes}" for option in (*each.opts, *each.secondary_opts)}
    source = inspect.getsource(importlib.import_module("longshore.cli.launch"))
    return found | {f"longshore launch {option}": "" for option in re.findall(r'\.add_argument\("(--[\w-]+)"', source)}


def _keys() -> dict[str, str]:
    """Return the keys that a configuration file may have; a refused one only says that it is switched off."""
    treated = {key.path: key.treatment.value for key in _of("longshore.compat.config.table", "TABLE")}
    return {path: f"  {treatment}" for path, treatment in treated.items() if treatment != "refused"}


def _variables() -> dict[str, str]:
    from scripts.docs.config_page import VARIABLES

    return {name: "" for name, (what, _) in VARIABLES.items() if not what.startswith("Set by")}


# -- the file ------------------------------------------------------------------


def page(before: str = "") -> str:
    """Return the content of the file; a section whose package is missing is taken from ``before``."""
    kept = sections_of(before)
    parts = [INTRODUCTION]
    for title, entries in sections().items():
        lines = sorted(f"{name}{rest}" for name, rest in entries.items()) or kept.get(title, [])
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    return "\n".join(parts)


ADVICE = """
If a name was added or extended, run python -m scripts.docs.public_api, and add a line to CHANGELOG.md.
If one was removed or changed, programs break: let the old use go on working, with a warning from longshore.deprecation,
for two minor versions (docs/stability.md). Then do the same.
"""


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if the file was out of date and was only checked."""
    before = FILE.read_text() if FILE.exists() else ""
    after = page(before)
    if before == after:
        return 0
    found = changes(before, after)
    print(f"docs/{FILE.name} differs from the package:")
    print(*(f"  {line}" for line in [*found.broken, *found.added]), sep="\n")
    if arguments == ["--check"]:
        print(ADVICE)
        return 1
    FILE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
