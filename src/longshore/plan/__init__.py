"""``longshore plan``: estimates of the memory and time of training on a machine, without the model's weights.

Bytes are counted by the functions with which the engine lays out tiles and buckets. Times come from simulating the
schedule by which the engine steps (:mod:`longshore.tiles.events`).
"""
