"""A hub for tests: one repository, served from a directory as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.local_server import served_by

COMMIT = "c" * 40


@contextmanager
def local_hub(directory: Path) -> Iterator[str]:
    """Its address, for `HF_ENDPOINT`; any `org/name` leads to the directory."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.send_json(self.described(listed="tree" in parts))
                return
            file = directory.joinpath(*parts[4:])
            if parts[2:3] != ["resolve"] or not file.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            content = file.read_bytes()
            self.send(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def described(self, *, listed: bool) -> object:
            files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
            if listed:
                return [
                    {"type": "file", "path": str(file.relative_to(directory)), "size": file.stat().st_size, "oid": "0"}
                    for file in files
                ]
            siblings = [{"rfilename": str(file.relative_to(directory))} for file in files]
            return {"id": "org/model", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}

        def send_json(self, value: object) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with served_by(Hub) as address:
        yield address
