"""Record the events of each tile, with their times: ``longshore.trace``."""

from longshore.tracing.events import Event
from longshore.tracing.record import Summary, Trace, annotate, trace

__all__ = ["Event", "Summary", "Trace", "annotate", "trace"]
