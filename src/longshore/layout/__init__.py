"""Which elements of which parameter are reduced, kept and stepped where, in which format and bytes: numbers alone.

A parameter is cut three times: by rank into ranges (``layout``), by size into tiles (``tiles``), and by home into
the memory where it rests (``memory``). Nothing here knows addresses, groups or kernels, and any thread may call.
"""
