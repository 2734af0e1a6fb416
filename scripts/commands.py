"""Commands of the scripts, with what they print."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    command: Sequence[str | Path],
    what: str,
    failure: type[Exception],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a command and return what it printed; ``failure`` with all of that if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        said = done.stdout.strip() or "it printed nothing"
        raise failure(f"{what} failed ({done.returncode}): {' '.join(str(word) for word in command)}\n{said}")
    return done.stdout
