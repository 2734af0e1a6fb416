"""Checkpoints: the state needed to resume a run, in safetensors and JSON files that are written atomically."""
