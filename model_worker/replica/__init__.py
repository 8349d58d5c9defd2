"""The inside of a model process: one link to the broker, three stages, one model."""
