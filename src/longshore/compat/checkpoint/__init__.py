"""DeepSpeed's checkpoints: read without DeepSpeed, and written as longshore's."""
