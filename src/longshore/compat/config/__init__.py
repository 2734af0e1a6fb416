"""DeepSpeed's configuration files: the table of their keys, and their translation into ``longshore.Config``."""
