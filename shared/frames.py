"""How large the frames of a message are, whatever holds them."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer


def frame_bytes(frame: Buffer) -> int:
    """Bytes in one frame."""
    return len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes


def frames_bytes(frames: Sequence[Buffer]) -> int:
    """Bytes in all of them together."""
    return sum(map(frame_bytes, frames))
