"""Story 2 cured: whatever the model's code starts, it starts in the model's own process.

HEADWAITER_CONFIG=examples/after/headwaiter.toml uvicorn examples.after.answers:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from headwaiter import ModelClient, RequestError, status_of


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with ModelClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
async def answer(body: dict[str, Any]) -> Any:
    return await app.state.client.predict("qa", {"question": body["question"], "context": body["context"]})


@app.exception_handler(RequestError)
async def refused(request: Request, error: RequestError) -> JSONResponse:
    return JSONResponse({"error": error.message, "error_type": error.code}, status_of(error))


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}
