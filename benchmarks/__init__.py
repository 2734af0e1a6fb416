"""What longshore costs, measured: ``make bench``, or ``python -m benchmarks --help``.

Four parts, each a module: the host step (``host_step``), a whole training step
(``whole_step``), host memory (``host_memory``), and the sharded engine (``engine``).

Training on one GPU, beside other people's offload, is a command of its own: ``python -m benchmarks.gpu``.
"""
