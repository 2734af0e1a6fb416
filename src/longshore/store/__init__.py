"""Stores: an optimizer's state and gradients by parameter, over the tiles of this process."""

from longshore.store.store import Store

__all__ = ["Store"]
