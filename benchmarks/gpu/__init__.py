"""Training on one device, offloaded in several ways and not at all: ``python -m benchmarks.gpu --help``.

``contestants`` are the ways, ``one_run`` is one of them in a process of its own,
``contest`` runs them in turn, ``figures`` draws, ``rows`` is the table.
"""
