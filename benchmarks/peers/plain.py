"""The usual recipes, without any hop: what people write before they need more. Served by uvicorn.

`raw_asgi` is the ceiling of what Python can do behind uvicorn; `echo` is FastAPI with a pydantic body; `minilm` holds
a model in every web worker and computes in its thread pool, `minilm_async` on its event loop.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI
from pydantic import BaseModel


class Body(BaseModel):
    inputs: str
    parameters: dict[str, Any] | None = None


async def raw_asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = orjson.dumps(orjson.loads(body)["inputs"])
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


echo = FastAPI()


@echo.post("/models/echo")
async def echo_back(body: Body) -> str:
    return body.inputs


def minilm() -> FastAPI:
    from encoder import Encoder

    encoder = Encoder()
    app = FastAPI()

    @app.post("/models/minilm")
    def embed(body: Body) -> list[float]:
        return encoder.encode([body.inputs])[0]

    @app.get("/livez")
    async def livez() -> str:
        return "ok"

    return app


def minilm_async() -> FastAPI:
    from encoder import Encoder

    encoder = Encoder()
    app = FastAPI()

    @app.post("/models/minilm")
    async def embed(body: Body) -> list[float]:
        return encoder.encode([body.inputs])[0]

    @app.get("/livez")
    async def livez() -> str:
        return "ok"

    return app
