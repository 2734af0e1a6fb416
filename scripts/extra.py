"""``python -m scripts.extra NAME``: print what an extra of pyproject.toml requires here, one requirement a line.

``pip install -e ".[NAME]"`` would compile the package again.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement


def requirements_of(extra: str) -> list[str]:
    """Return the requirements that ``longshore[extra]`` adds on this machine; ValueError if there is no such extra."""
    found = metadata.metadata("longshore")
    if extra not in found.get_all("Provides-Extra", []):
        raise ValueError(f"longshore has no extra {extra!r}")
    chosen = []
    for each in map(Requirement, found.get_all("Requires-Dist", [])):
        marker, each.marker = each.marker, None
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            chosen.append(str(each))
    return chosen


if __name__ == "__main__":
    print("\n".join(requirements_of(sys.argv[1])))
