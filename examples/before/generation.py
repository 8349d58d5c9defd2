"""Story 1 as people write it: a pipeline in every web worker.

MODEL=examples/models/gpt uvicorn examples.before.generation:app --workers 4
"""

import os

from fastapi import FastAPI
from transformers import pipeline

app = FastAPI()
generator = pipeline("text-generation", model=os.environ["MODEL"])


@app.post("/generate")
def generate(body: dict):
    return generator(body["text"], max_new_tokens=body.get("max_new_tokens", 20), do_sample=False)


@app.get("/health")
def health():
    return {"status": "ok"}
