"""``longshore plan``: what a model takes on a machine, before either is there.

Bytes are counted by the functions by which the engine lays out tiles and buckets; times come from a simulation of the
schedule by which it steps (:mod:`longshore.host.events`).
"""
