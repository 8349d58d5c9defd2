"""Pictures as they arrive in a request: the bytes of a file, opened within bounds.

Owns the bounds: which formats are opened, how many pixels all pictures of one request may have, and how long and thin
one may be. What a header claims is checked before anything is decoded: a few kilobytes can stand for gigabytes.
"""

from __future__ import annotations

import io
from typing import Any

from model_worker.runtimes import loading
from shared.errors import InvalidInput

# All pictures of one request together: one photograph of the largest cameras. It takes 200 MB, and, as WebP, a gigabyte
# while it is decoded; the pictures of other requests wait meanwhile.
PIXELS_MAX = 2**26
# Many processors scale the shorter side to a fixed length and the longer one along with it, however long that gets.
SIDE_RATIO_MAX = 100
# A progressive JPEG goes over all its pixels once a scan. Encoders make about ten, a megabyte has room for 100,000.
_JPEG_SCANS_MAX = 100
_JPEG_SCAN = b"\xff\xda"
# Pillow knows more, and runs other programs for some of them (EPS is handed to Ghostscript).
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class PictureReader:
    """Opens the pictures of one request."""

    def __init__(self) -> None:
        self._pixels = 0

    def read(self, data: bytes, where: str) -> Any:
        """A PIL image in RGB, upright; of an animation the first picture. `where` is what an error calls it.

        Raises:
            InvalidInput: it is no picture, or too large.
        """
        if data.count(_JPEG_SCAN) > _JPEG_SCANS_MAX and data.startswith(b"\xff\xd8"):
            raise InvalidInput(f"{where} is a JPEG of more than {_JPEG_SCANS_MAX} scans: store it again")
        try:
            from PIL import UnidentifiedImageError
        except ImportError:
            raise InvalidInput(
                f"{where} is a picture, and none is read here: have headwaiter[images] installed on the server"
            ) from None
        try:
            return self._open(data, where)
        except InvalidInput:
            raise
        except UnidentifiedImageError:
            raise InvalidInput(f"{where} is not a picture in any of these formats: {', '.join(_FORMATS)}") from None
        except Exception as error:
            # Decoders of files that anybody may have made: there is no end to what they raise.
            text = f"{type(error).__name__}: {loading.one_line(error)}"
            raise InvalidInput(f"{where} is not a picture that can be read: {text}") from None

    def _open(self, data: bytes, where: str) -> Any:
        from PIL import Image, ImageOps

        Image.init()
        with Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
            self._check_size(*image.size, where)
            # Its pixels are decoded only now.
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")

    def _check_size(self, width: int, height: int, where: str) -> None:
        size = f"{width} by {height} pixels"
        if min(width, height) < 1:
            raise InvalidInput(f"{where} has {size}")
        if max(width, height) > SIDE_RATIO_MAX * min(width, height):
            raise InvalidInput(f"{where} has {size}: no side may be more than {SIDE_RATIO_MAX} times the other")
        self._pixels += width * height
        if self._pixels > PIXELS_MAX:
            others = "" if self._pixels == width * height else ", and there are others in the request"
            raise InvalidInput(
                f"{where} has {size}{others}; all pictures of one request may have {PIXELS_MAX} pixels: scale it down",
                detail={"limit_pixels": PIXELS_MAX},
            )
