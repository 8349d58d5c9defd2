"""The application of answers.py without `async`: routes are plain functions, on the threads that FastAPI gives them.

    HEADWAITER_CONFIG=examples/after/headwaiter.toml uvicorn examples.after.blocking:app

One `BlockingModelClient` serves any number of threads, in Flask or a script just as well.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from headwaiter import BlockingModelClient, RequestError, status_of


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # Opened here and not at import: a server may fork in between.
    with BlockingModelClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
def answer(body: dict[str, Any]) -> Any:
    return app.state.client.predict("qa", {"question": body["question"], "context": body["context"]})


@app.exception_handler(RequestError)
async def refused(request: Request, error: RequestError) -> JSONResponse:
    return JSONResponse({"error": error.message, "error_type": error.code}, status_of(error))


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}
