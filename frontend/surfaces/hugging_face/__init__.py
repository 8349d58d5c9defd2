"""The dialect of Hugging Face's inference API, as `huggingface_hub.InferenceClient` speaks it.

`surface.py` has the routes, `tasks.py` what each task's questions and answers look like, `generation.py` the same for
text generation, `errors.py` what goes wrong.
"""
