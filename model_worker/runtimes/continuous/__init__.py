"""Continuous batching: sequences join and leave a batch of text generation between any two of its steps.

`engines.build` chooses how a loaded model is driven; `Engine` is what a runtime talks to. Refuses HTTP, queues and
threads: whoever owns the main thread of the model process calls `step` as long as something runs.
"""
