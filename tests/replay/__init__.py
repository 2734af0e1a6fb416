"""What the kernels and the collectives do in some runs, recorded and compared (``make replay``)."""
