"""A router for tests of what is told of own routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from headwaiter import ModelClient, headwaiter_client

router = APIRouter()


@router.post("/twice")
async def twice(body: list[int], client: Annotated[ModelClient, Depends(headwaiter_client)]) -> list[object]:
    return [await client.predict("quiet", number) for number in body]
