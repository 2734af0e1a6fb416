"""``longshore plan``: the memory and time that training a model takes on a machine, estimated without making either.

Bytes are counted by the functions with which the engine lays out tiles and buckets. Times come from simulating the
schedule by which the engine steps (:mod:`longshore.tiles.events`).
"""
