"""The applications of `examples/before` with a `ModelClient` in place of the model. docs/migrate.md tells the steps."""
