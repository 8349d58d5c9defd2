"""Story 1 cured: the web workers hold a client, and headwaiter holds as many copies as its configuration names.

HEADWAITER_CONFIG=examples/after/headwaiter.toml uvicorn examples.after.generation:app --workers 4
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


@app.post("/generate")
async def generate(body: dict[str, Any]) -> list[dict[str, str]]:
    parameters = {"max_new_tokens": body.get("max_new_tokens", 20), "do_sample": False, "return_full_text": True}
    answer: Any = await app.state.client.predict("gpt", body["text"], parameters)
    # The callers of this route are used to the pipeline's list.
    return [{"generated_text": answer["generated_text"]}]


@app.exception_handler(RequestError)
async def refused(request: Request, error: RequestError) -> JSONResponse:
    return JSONResponse({"error": error.message, "error_type": error.code}, status_of(error))


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}
