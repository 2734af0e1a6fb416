"""Whose surface this is, and who stands behind it."""

from longshore.compat.absent import getter

VERSION = "0.19.0+longshore"
"""Of DeepSpeed, as scripts compare it; the part behind the plus says that it is not DeepSpeed."""

version = VERSION
git_hash = git_branch = None
installed_ops: dict[str, bool] = {}

__getattr__ = getter(__name__)
