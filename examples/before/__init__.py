"""The two applications as people write them. docs/why.md says what happens to them; `examples/after` has them cured."""
