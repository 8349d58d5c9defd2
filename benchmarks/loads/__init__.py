"""The loads, one module each: `measure(run)` takes all samples of its load."""
