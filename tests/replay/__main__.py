"""Record what the native kernels and the collectives do, or compare it: ``python -m replay`` (``make replay``).

``--record`` writes recorded.json anew: after a change that is meant to change bytes, calls or collectives, in a commit
that says so. Without it what runs now is compared with that file; each difference is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ranks import Ranks

from replay.runs import RUNS, played

RECORDED = Path(__file__).parent / "recorded.json"
SAME_SUMS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""With these torch multiplies matrices alike on every x86-64 machine; libraries read them when they are loaded."""


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [line for key in {**before, **now}
                for line in differences(before.get(key), now.get(key), f"{place} {key}")]  # fmt: skip
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [line for at, (one, other) in enumerate(zip(before, now, strict=True))
                for line in differences(one, other, f"{place} {at}")]  # fmt: skip
    return [] if before == now else [f"{place.strip()}: {before!r}, now {now!r}"]


def written(recorded: dict[str, list[list[Any]]]) -> str:
    """JSON with a line for each window."""
    runs = []
    for name, by_rank in recorded.items():
        ranks = [",\n    ".join(json.dumps(window) for window in windows) for windows in by_rank]
        runs.append(f"  {json.dumps(name)}: [[\n    " + "\n  ], [\n    ".join(ranks) + "\n  ]]")
    return "{\n" + ",\n".join(runs) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replay", description=__doc__)
    parser.add_argument("words", nargs="*", help="that the name of a run has in it")
    parser.add_argument("--record", action="store_true", help="write what runs now")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SAME_SUMS.items()):
        os.execve(sys.executable, [sys.executable, "-m", "replay", *sys.argv[1:]], {**os.environ, **SAME_SUMS})
    names = [name for name in RUNS if all(word in name for word in arguments.words)]
    ranks = Ranks(2)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    different = len(gone := [name for name in recorded if name not in RUNS])
    for name in gone:
        print(f"{name}: it was recorded, and is no run any more")
    for name in names:
        by_rank = ranks(played, name) if RUNS[name].ranks > 1 else [played(name)]
        found = json.loads(json.dumps(by_rank))
        if arguments.record:
            recorded[name] = found
        elif lines := differences(recorded.get(name), found):
            different += 1
            print(f"{name}: other than recorded", *lines[:20], sep="\n  ", flush=True)
    if arguments.record:
        RECORDED.write_text(written({name: recorded[name] for name in RUNS if name in recorded}))
    print(f"{len(names)} runs, {different} other than recorded" if not arguments.record else f"{len(names)} recorded")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
