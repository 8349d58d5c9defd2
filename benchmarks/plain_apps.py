"""The usual recipes, to compare with: what people write before they know headwaiter. Started by `benchmarks.figures`.

`echo` is FastAPI with a pydantic body and no model; `minilm` holds a model in every web worker.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class Body(BaseModel):
    inputs: str
    parameters: dict[str, Any] | None = None


echo = FastAPI()


@echo.post("/models/echo")
async def echo_back(body: Body) -> str:
    return body.inputs


def minilm() -> FastAPI:
    """One copy of the encoder per web worker."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    source = os.environ["MINILM_DIRECTORY"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source).eval()
    app = FastAPI()

    @app.post("/models/minilm")
    def embed(body: Body) -> list[float]:
        with torch.inference_mode():
            encoded = tokenizer(body.inputs, return_tensors="pt", truncation=True)
            hidden = model(**encoded).last_hidden_state
            vector = torch.nn.functional.normalize(hidden.mean(dim=1), dim=1)
        values: list[float] = vector[0].tolist()
        return values

    return app
