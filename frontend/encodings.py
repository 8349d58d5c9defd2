"""Request bodies that were compressed for the way.

Owns which encodings are read, and the bound on what comes out: a few kilobytes can stand for gigabytes.
"""

from __future__ import annotations

import zlib

from shared.errors import Code, RequestError

# What zlib is told to expect: https://docs.python.org/3/library/zlib.html#zlib.decompress. HTTP's `deflate` is zlib's
# own format, https://www.rfc-editor.org/rfc/rfc9110#name-deflate-coding.
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
IDENTITY = b"identity"
ENCODINGS = (IDENTITY, *_WINDOW_BITS)


def expanded(body: bytes, encoding: bytes, bytes_max: int) -> bytes | None:
    """What `body`, of one of `ENCODINGS`, stands for; None if that is more than `bytes_max` bytes.

    Raises:
        RequestError: `bad_request`, where it is no such data, or not one whole piece of it.
    """
    if encoding == IDENTITY:
        return body
    decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = decoder.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise _unreadable(encoding, str(error)) from None
    if len(content) > bytes_max:
        return None
    if not decoder.eof:
        raise _unreadable(encoding, "it ends too early")
    # (Several pieces in one body would be allowed. Nobody sends them, and a million empty ones would take minutes.)
    if decoder.unused_data:
        raise _unreadable(encoding, f"{len(decoder.unused_data)} bytes follow its end")
    return content


def _unreadable(encoding: bytes, reason: str) -> RequestError:
    text = f"the request body is not what its Content-Encoding {encoding.decode()!r} says: {reason}"
    return RequestError(text, code=Code.BAD_REQUEST)
