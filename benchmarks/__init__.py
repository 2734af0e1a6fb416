"""What longshore costs, measured: ``make bench``, or ``python -m benchmarks --help``.

Three parts, each a module: the host step (``host_step``), a whole training step
(``whole_step``), and host memory (``host_memory``).
"""
