"""The Open Inference Protocol, version 2, as KServe and Triton's HTTP clients speak it.

https://github.com/kserve/open-inference-protocol, with the extension that sends tensors as bytes behind the JSON.
"""
