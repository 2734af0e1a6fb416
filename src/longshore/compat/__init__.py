"""Modules under other projects' names, for scripts that should run unchanged."""
