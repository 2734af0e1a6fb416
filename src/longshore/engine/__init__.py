"""The sharded engine: configuration, windows, precision, clipping."""
