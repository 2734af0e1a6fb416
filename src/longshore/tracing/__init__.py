"""Record what happens to each tile, and when: ``longshore.trace``."""

from longshore.tracing.events import Event
from longshore.tracing.record import Summary, Trace, annotate, trace

__all__ = ["Event", "Summary", "Trace", "annotate", "trace"]
