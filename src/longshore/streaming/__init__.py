"""Models larger than the device: parameters rest in host memory, and blocks of them are on the device while in use."""

from __future__ import annotations

from longshore.streaming.parameters import leave_behind_on_fork
from longshore.streaming.stream import Stream, StreamCounts, stream, streams_of

__all__ = ["Stream", "StreamCounts", "leave_behind_on_fork", "stream", "streams_of"]
