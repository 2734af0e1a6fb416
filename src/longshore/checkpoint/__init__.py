"""Checkpoints: what a run needs to go on, in safetensors and JSON, whole or not there at all."""
