"""The names of DeepSpeed's package that training scripts use, implemented by longshore.

Use it as ``import longshore.compat.deepspeed as deepspeed``, or run a script with ``longshore run-deepspeed``.
A name that is missing raises an error that names its replacement; ``hasattr`` is then false. Submodules
(``deepspeed.ops.adam``) are not files: :mod:`longshore.compat.finder` makes them from the table in
:mod:`longshore.compat.names`.
"""

import sys
from typing import Any

from longshore.compat.finder import fill, find_submodules

__path__: list[str] = []


def __getattr__(name: str) -> Any:  # for type checkers; fill() puts another in its place
    raise AttributeError(name)


find_submodules()
fill(sys.modules[__name__])
