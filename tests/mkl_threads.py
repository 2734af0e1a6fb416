"""One thread for MKL, which goes by its own count in each thread that begins, whatever ``torch.set_num_threads`` says.

On some processors a product has other bits with two threads, so that a backward in a thread of its own on the CPU
would not be the device's. MKL reads the variable when torch is imported: this is imported before.
"""

from __future__ import annotations

import os

os.environ.setdefault("MKL_NUM_THREADS", "1")
