"""``import deepspeed`` finds longshore, in this process."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from longshore.compat.absent import HERE, NAME, advice, their_name


class _SameModule(Loader):
    """Gives the module that there is: ``deepspeed.comm`` and ``longshore.compat.deepspeed.comm`` are one object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import put another one there; the module was executed under its own


class _StandIn(Distribution):
    """What ``importlib.metadata`` says of ``deepspeed``."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        from longshore.compat.deepspeed.version import VERSION

        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: longshore in its place\n"

    def locate_file(self, path: Any) -> Any:
        return path


class DeepSpeedFinder(MetaPathFinder):
    """Answers for ``deepspeed`` and everything below it, before what is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """An import of a module of DeepSpeed's that is not here raises ModuleNotFoundError, with what to use."""
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        ours = HERE + fullname.removeprefix(NAME)
        found = importlib.util.find_spec(ours)
        if found is None:
            if _imported():
                raise _not_found(fullname)
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname,
            _SameModule(ours),
            origin=found.origin,
            is_package=found.submodule_search_locations is not None,
        )
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations += found.submodule_search_locations or []
        return spec

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        name = (context or DistributionFinder.Context()).name
        return [_StandIn()] if name is not None and name.lower() == NAME else []


class _Advice(MetaPathFinder):
    """The last to be asked: says what to use in place of a module or a name that is not in our package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        # ``from package import name`` looks for a module of that name last, and Python's own words have no advice.
        if fullname.startswith(f"{HERE}.") and _imported():
            raise _not_found(their_name(fullname))


def _imported() -> bool:
    """Whether an import statement asks, and not :func:`importlib.util.find_spec`, which is to find nothing."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name in ("_find_and_load", "_gcd_import", "_handle_fromlist"):
            return True
        frame = frame.f_back
    return False


def _not_found(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"longshore has no {name}: {advice(name.removeprefix(f'{NAME}.'))}", name=name)


def advise() -> None:
    """Have ``from longshore.compat.deepspeed import X`` say what to use in place of ``X``."""
    if not any(isinstance(finder, _Advice) for finder in sys.meta_path):
        sys.meta_path.append(_Advice())


def stand_in_for_deepspeed() -> None:
    """From now on ``import deepspeed`` gives :mod:`longshore.compat.deepspeed` in this process.

    What is installed is neither read nor changed.

    Raises:
        RuntimeError: DeepSpeed itself was imported already.
    """
    already = sys.modules.get(NAME)
    if already is not None and not already.__name__.startswith(HERE):
        raise RuntimeError("deepspeed was imported already, from what is installed; stand in for it before")
    if not any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeepSpeedFinder())


def stand_aside() -> None:
    """Undo :func:`stand_in_for_deepspeed`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, DeepSpeedFinder)]
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
