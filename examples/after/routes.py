"""The routes of both stories in headwaiter's own front workers: no application beside them, no second port.

    headwaiter serve --config examples/after/headwaiter.toml

`[http] routers` in that file names this router. Compare `generation.py` and `answers.py`, which are whole applications.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from headwaiter import ModelClient, headwaiter_client

router = APIRouter(tags=["stories"])
Client = Annotated[ModelClient, Depends(headwaiter_client)]


@router.post("/generate")
async def generate(body: dict[str, Any], client: Client) -> list[dict[str, str]]:
    parameters = {"max_new_tokens": body.get("max_new_tokens", 20), "do_sample": False, "return_full_text": True}
    answer: Any = await client.predict("gpt", body["text"], parameters)
    # The callers of this route are used to the pipeline's list.
    return [{"generated_text": answer["generated_text"]}]


@router.post("/answer")
async def answer(body: dict[str, Any], client: Client) -> Any:
    return await client.predict("qa", {"question": body["question"], "context": body["context"]})
