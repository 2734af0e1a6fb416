"""``python -m simulated_device.command_line BYTES train ...``: longshore's command line, where the accelerator is the
simulated one and has so many bytes."""

from __future__ import annotations

import sys

import simulated_device

if __name__ == "__main__":
    simulated_device.register()
    simulated_device.native().set_budget(int(sys.argv[1]))
    from longshore.cli import main

    sys.exit(main(sys.argv[2:]))
