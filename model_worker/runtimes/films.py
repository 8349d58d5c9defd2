"""Films as they arrive in a request: the bytes of a file; what leaves are its pictures, as many as a model looks at.

Owns the decoder and its bounds, and the one pipeline that reads films. The library's own hands the bytes to a decoder
that follows what they refer to: a playlist of addresses is a film to it, and would be fetched.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from model_worker.runtimes import loading
from shared.errors import InvalidInput

Frames = list[NDArray[np.uint8]]

# All pictures of one film together that a model looks at: 16 of the largest usual size, 4096 by 2160, 400 MB.
PIXELS_MAX = 2**27
# What is decoded for those, one after the other: most of them are thrown away.
FRAMES_MAX = 4096
_OPTIONS = {
    # Files that are films themselves. Others are lists of where films are.
    "format_whitelist": "avi,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,ogg",
    "protocol_whitelist": "none",
}


@dataclass(frozen=True, slots=True)
class Film:
    """The bytes of a file, as media.py hands them to the pipeline."""

    data: bytes
    where: str


def frames(film: Film, count: int, every: int) -> Frames:
    """`count` pictures, uint8 [height, width, 3], spread evenly over the first `count * every` ones.

    Raises:
        InvalidInput: it is no film, or too short, or its pictures are too large.
    """
    import av

    if count * every > FRAMES_MAX:
        raise InvalidInput(f"num_frames times frame_sampling_rate is {count * every}; at most {FRAMES_MAX} can be read")
    indices = np.linspace(0, count * every - 1, num=count, dtype=np.int64).tolist()
    try:
        with av.open(io.BytesIO(film.data), container_options=_OPTIONS, io_open=_refuse_to_open) as container:
            found = _decode(container, indices, film.where)
    except InvalidInput:
        raise
    except Exception as error:
        # Decoders of files that anybody may have made: there is no end to what they raise.
        text = f"{type(error).__name__}: {loading.one_line(error)}"
        raise InvalidInput(f"{film.where} is not a film that can be read: {text}") from None
    if len(found) < count:
        raise InvalidInput(
            f"{film.where} is a film of too few pictures: {count} are wanted from its first {count * every}, and "
            f"{len(found)} of these are there: send a longer one, or a smaller frame_sampling_rate"
        )
    return found


def _decode(container: Any, indices: list[int], where: str) -> Frames:
    if not container.streams.video:
        raise InvalidInput(f"{where} is a file without pictures")
    stream = container.streams.video[0]
    _check_size(stream.codec_context.width, stream.codec_context.height, len(indices), where)
    wanted = set(indices)
    found = []
    for number, frame in enumerate(container.decode(stream)):
        if number > indices[-1]:
            break
        if number in wanted:
            # It may change within a film.
            _check_size(frame.width, frame.height, len(indices), where)
            found.append(frame.to_ndarray(format="rgb24"))
    return found


def _check_size(width: int, height: int, count: int, where: str) -> None:
    if width * height * count > PIXELS_MAX:
        raise InvalidInput(
            f"{where} has pictures of {width} by {height} pixels; the {count} that the model looks at may have "
            f"{PIXELS_MAX} together: scale it down",
            detail={"limit_pixels": PIXELS_MAX},
        )


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("it refers to another file or address, and these are not read")


def reading(pipeline_class: type[Any]) -> type[Any]:
    """The pipeline for films, with this module's decoder in place of the library's."""

    def preprocess(self: Any, video: Film, num_frames: int | None = None, frame_sampling_rate: int = 1) -> Any:
        wanted = frames(video, num_frames or self.model.config.num_frames, frame_sampling_rate)
        return self.image_processor(wanted, return_tensors="pt").to(self.dtype)

    return type(pipeline_class.__name__, (pipeline_class,), {"preprocess": preprocess, "_load_video_processor": False})
