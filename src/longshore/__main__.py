"""``python -m longshore``, and so ``torchrun -m longshore``: the command line."""

from __future__ import annotations

import sys

from longshore.cli import main

if __name__ == "__main__":
    sys.exit(main())
