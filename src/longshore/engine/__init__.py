"""The engine: what turns a model, a configuration and some ranks into training steps."""
