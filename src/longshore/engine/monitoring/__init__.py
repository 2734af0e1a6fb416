"""A run's numbers as a stream: measured without changing a bit, and written by the libraries that people look with."""

from longshore.engine.monitoring.monitor import Monitor, NoMonitor, check_installed, monitor_for

__all__ = ["Monitor", "NoMonitor", "check_installed", "monitor_for"]
