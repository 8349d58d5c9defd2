"""The front's application with a page to chat in, at /chat: one more route, in front of the same models.

headwaiter serve --config examples/demo.toml
HEADWAITER_CONFIG=examples/demo.toml uvicorn examples.chat_page:app --port 8081

Browsers let a page talk to the service that it came from, so it is served here and not opened as a file. For a page
that comes from elsewhere, `http.cors_origins` names its origin.
"""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import FileResponse

from frontend.app import create_app

PAGE = Path(__file__).with_name("chat.html")

app = create_app()


@app.get("/chat", include_in_schema=False)
async def chat() -> FileResponse:
    return FileResponse(PAGE)
