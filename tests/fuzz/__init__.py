"""A differential fuzzer: random training programs, each run in plain PyTorch and in longshore (``make fuzz``).

A program is a list of statements of Python. The same statements run with the names of ``worlds.py``, once bound to
torch's classes and once to longshore's, and everything that a program can see is compared after each statement.

Programs have one of several vocabularies: ``scripts`` (an optimizer or an engine), ``states`` (encoded ones), ``muon``,
``chains`` (of checkpoints, over modes and numbers of ranks), ``files`` (configurations with mistakes), and, on the
simulated accelerator, ``streams``.
"""

import mkl_threads  # noqa: F401  before torch
