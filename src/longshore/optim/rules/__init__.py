"""The rules that have kernels, one file each.

A file states everything about its rule: the hyper-parameters and their scalars,
the arithmetic, the options of a parameter group, and the optimizer that users
build. Host, device, configuration, planner and documentation read it from there.
Only the native arithmetic is elsewhere, as an entry of ``native/rules.inl``.

Importing this package imports all of them.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
