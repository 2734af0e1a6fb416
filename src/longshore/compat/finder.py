"""Import of DeepSpeed's modules, which are made from the table of names, also under the name ``deepspeed``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from longshore.compat.absent import NAME, UNUSABLE, VERSION, attribute_error, message, unusable

HERE = "longshore.compat.deepspeed"

# longshore.compat.names is imported inside functions: it loads torch and the engine, and a program that only asks
# whether there is a package named deepspeed should not wait for them.


def fill(module: ModuleType) -> None:
    """Put a module's names from the table into it, and import its submodules."""
    from longshore.compat.names import PROVIDED

    path = module.__name__.removeprefix(HERE).removeprefix(".")
    names = PROVIDED[path] if path in PROVIDED else unusable(path)
    vars(module).update(names)
    submodules = [each.rpartition(".")[2] for each in PROVIDED if each and each.rpartition(".")[0] == path]
    for name in submodules:
        importlib.import_module(f"{module.__name__}.{name}")
    if not path:
        vars(module)["dist"] = vars(module)["comm"]

    def missing(name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name)
        raise attribute_error(path, name)

    vars(module)["__all__"] = sorted({name for name in names if not name.startswith("_")} | {*submodules})
    vars(module)["__getattr__"] = missing


def _imported() -> bool:
    """Return whether an import statement is asking; :func:`importlib.util.find_spec` has to get None, not an error."""
    frame: Any = sys._getframe(2)  # the caller of find_spec()
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name in ("_find_and_load", "_gcd_import", "_handle_fromlist"):
            return True
        frame = frame.f_back
    return False


class _FromTable(Loader):
    """Makes a submodule of :mod:`longshore.compat.deepspeed`."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"``{module.__name__.removeprefix('longshore.compat.')}``, implemented by longshore."
        fill(module)


class _SameModule(Loader):
    """Returns the existing module: ``deepspeed.comm`` and ``longshore.compat.deepspeed.comm`` are one object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the alias's


class DeepSpeedFinder(MetaPathFinder):
    """Finds the modules below one of the two names of the package, and raises for modules that are not there.

    ``from package import name`` looks for a module of that name last, so that the error, which says what to use
    instead, also covers missing names.

    Args:
        root: ``deepspeed``, or the name of the package here.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.root and not fullname.startswith(f"{self.root}."):
            return None
        if below := fullname.removeprefix(self.root).removeprefix("."):
            from longshore.compat.names import PROVIDED

            if below not in PROVIDED and below not in UNUSABLE:
                if _imported():
                    raise ModuleNotFoundError(message(below), name=f"{NAME}.{below}")
                return None
        loader = _FromTable() if self.root == HERE else _SameModule(HERE + fullname.removeprefix(NAME))
        return ModuleSpec(fullname, loader, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        name = (context or DistributionFinder.Context()).name
        return [_Metadata()] if name is not None and name.lower() == NAME == self.root else []


class _Metadata(Distribution):
    """The metadata of ``deepspeed`` that :mod:`importlib.metadata` finds."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None

        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: longshore in its place\n"

    def locate_file(self, path: Any) -> Any:
        return path


def _finders(root: str) -> list[DeepSpeedFinder]:
    return [each for each in sys.meta_path if isinstance(each, DeepSpeedFinder) and each.root == root]


def find_submodules() -> None:
    """Make the modules below :mod:`longshore.compat.deepspeed` importable, from the table of names."""
    if not _finders(HERE):
        sys.meta_path.append(DeepSpeedFinder(HERE))


def stand_in_for_deepspeed() -> None:
    """Make ``import deepspeed`` return :mod:`longshore.compat.deepspeed`, in this process.

    An installed DeepSpeed is neither read nor changed.

    Raises:
        RuntimeError: DeepSpeed itself was imported already.
    """
    already = sys.modules.get(NAME)
    if already is not None and not already.__name__.startswith(HERE):
        raise RuntimeError(
            "the installed deepspeed was imported already; call stand_in_for_deepspeed() before anything imports it"
        )
    if not _finders(NAME):
        sys.meta_path.insert(0, DeepSpeedFinder(NAME))  # before what is installed


def stand_aside() -> None:
    """Undo :func:`stand_in_for_deepspeed`."""
    for finder in _finders(NAME):
        sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
