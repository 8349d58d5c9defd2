"""An HTTP server of a test's own, for programs that ask somebody else: a hub, a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which it answers, on a free port, until the block ends. Writes no log."""
    silent = type("Silent", (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), silent) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
