"""The version of the product; `pyproject.toml` carries the same text, and a test compares the two."""

VERSION = "0.1.0"
