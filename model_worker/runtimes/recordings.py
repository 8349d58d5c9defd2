"""Recordings as they arrive in a request: the bytes of a file, or samples with their rate; what leaves are samples.

Owns the decoders, the bounds, and what a rate may be. A plain WAV file is read here; others by soundfile, if that is
installed, or by a program called ffmpeg, if there is one: neither is told a name or an address, and ffmpeg is forbidden
to open any.
"""

from __future__ import annotations

import importlib.util
import io
import math
import shutil
import subprocess
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.runtimes import checks, loading
from shared.errors import InvalidInput

Samples = NDArray[np.float32]

# All recordings of one request together: 70 minutes at 16 kHz, 256 MB. A file of silence takes a thousandth of that.
SAMPLES_MAX = 2**26
# The resampler makes a filter for each phase of both rates: as many numbers as the two have, shortened, multiplied.
_RESAMPLING_MAX = 2**24
_RATE_MAX_HZ = 1_000_000
# Of a file of `SAMPLES_MAX` samples; what takes longer is stuck.
_FFMPEG_S = 120.0
_SAMPLES_KEYS = ("raw", "array")
_KEYS = (*_SAMPLES_KEYS, "sampling_rate", "stride")


class RecordingReader:
    """Reads the recordings of one request.

    `rate_hz` is the model's own, to which files are brought. None: the model does not say, and takes samples alone.
    """

    def __init__(self, rate_hz: int | None) -> None:
        self._rate_hz = rate_hz
        self._samples = 0

    def read_file(self, data: bytes, where: str) -> Samples:
        """Mono, at the model's rate.

        Raises:
            InvalidInput: it is no recording, or too long, or nothing here reads it.
        """
        if self._rate_hz is None:
            raise InvalidInput(f"{where}: the model does not say at what rate it listens: send samples")
        samples = _read_plain_wav(data, self._rate_hz)
        if samples is None:
            samples = self._read_any(data, where)
        return self._checked(samples, where)

    def read_samples(self, value: Any, where: str) -> Samples:
        """
        Raises:
            InvalidInput: no list of finite numbers, or too many.
        """
        try:
            # (What is too large for this type becomes an infinity, which is refused below.)
            with np.errstate(over="ignore"):
                samples = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"{where} must be a list of numbers, got {checks.shown(value)}") from None
        if samples.ndim != 1:
            raise InvalidInput(f"{where} must be a list of numbers in one dimension, got the shape {samples.shape}")
        return self._checked(samples, where)

    def read_object(self, value: Mapping[str, Any], where: str, *, may_resample: bool) -> dict[str, Any]:
        """`{"raw": samples, "sampling_rate": hertz}`; `may_resample` says whether the pipeline can bring it to the
        model's rate, which takes torchaudio.

        Raises:
            InvalidInput: another object, or a rate that cannot be used.
        """
        for key in value:
            if key not in _KEYS:
                raise InvalidInput(f"{where}.{key} is not read: a recording is bytes, base64, or {_OBJECT}")
        named = [key for key in _SAMPLES_KEYS if key in value]
        if len(named) != 1 or "sampling_rate" not in value:
            raise InvalidInput(f"{where} must be bytes, base64, or {_OBJECT}, got the keys {', '.join(value) or '-'}")
        samples = self.read_samples(value[named[0]], f"{where}.{named[0]}")
        rate_hz = self._check_rate(value["sampling_rate"], len(samples), where, may_resample)
        return {"raw": samples, "sampling_rate": rate_hz, **{key: value[key] for key in value if key == "stride"}}

    def _check_rate(self, given: object, samples: int, where: str, may_resample: bool) -> int:
        own = self._rate_hz
        if own is not None and given == own and not isinstance(given, bool):
            return own
        if own is not None and not (may_resample and importlib.util.find_spec("torchaudio") is not None):
            raise InvalidInput(
                f"{where}.sampling_rate must be {own}, got {checks.shown(given)}: recordings are not resampled here"
            )
        rate_hz = checks.whole_number(f"{where}.sampling_rate", given, at_least=1, at_most=_RATE_MAX_HZ)
        if own is not None:
            shared = math.gcd(rate_hz, own)
            if rate_hz * own // shared**2 > _RESAMPLING_MAX or samples * own > SAMPLES_MAX * rate_hz:
                raise InvalidInput(f"{where}.sampling_rate {rate_hz} cannot be brought to {own}: send {own}")
        return rate_hz

    def _read_any(self, data: bytes, where: str) -> Samples:
        rate_hz, reason = int(self._rate_hz or 0), ""
        if importlib.util.find_spec("soundfile") is not None:
            found = _read_with_soundfile(data, rate_hz, where)
            if isinstance(found, np.ndarray):
                return found
            reason = found
        if shutil.which("ffmpeg") is not None:
            return _read_with_ffmpeg(data, rate_hz, where)
        if not reason:
            reason = (
                f"it is no WAV file of 16 bits, one channel and {rate_hz} samples a second, and nothing else is read "
                "here: convert it, or have headwaiter[audio] or ffmpeg installed on the server"
            )
        raise InvalidInput(f"{where} is not a recording that can be read: {reason}")

    def _checked(self, samples: Samples, where: str) -> Samples:
        if samples.size == 0:
            raise InvalidInput(f"{where} is a recording without samples")
        self._samples += samples.size
        if self._samples > SAMPLES_MAX:
            raise _too_long(where)
        if not np.isfinite(samples).all():
            raise InvalidInput(f"{where} holds samples that are no finite numbers")
        return samples


_OBJECT = '{"raw": samples, "sampling_rate": hertz}'


def _too_long(where: str) -> InvalidInput:
    return InvalidInput(
        f"{where} is too long: all recordings of one request may have {SAMPLES_MAX} samples: send several",
        detail={"limit_samples": SAMPLES_MAX},
    )


def _read_plain_wav(data: bytes, rate_hz: int) -> Samples | None:
    """The samples of a WAV file in its plainest form, at the model's rate; None: for another decoder."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, rate_hz):
                return None
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    # A file that was cut off may end within a sample.
    samples = np.frombuffer(frames, "<i2", count=len(frames) // 2)
    return samples.astype(np.float32) / np.float32(32768)


def _read_with_soundfile(data: bytes, rate_hz: int, where: str) -> Samples | str:
    """The samples, or why there are none."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.samplerate != rate_hz:
                return (
                    f"it has {file.samplerate} samples a second, and the model takes {rate_hz}: convert it, or have "
                    "ffmpeg installed on the server"
                )
            if file.frames * file.channels > SAMPLES_MAX:
                raise _too_long(where)
            frames: Samples = file.read(dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        # (Its text as an exception names an object of Python's.)
        return str(getattr(error, "error_string", "")) or loading.one_line(error)
    mono: Samples = frames.mean(axis=1, dtype=np.float32)
    return mono


def _read_with_ffmpeg(data: bytes, rate_hz: int, where: str) -> Samples:
    seconds_max = SAMPLES_MAX // rate_hz + 1
    command = [
        *("ffmpeg", "-nostdin", "-hide_banner", "-loglevel", "error"),
        # Playlists and their like name other files and addresses: none of them is opened.
        *("-protocol_whitelist", "pipe", "-i", "pipe:0", "-vn", "-t", str(seconds_max)),
        *("-ac", "1", "-ar", str(rate_hz), "-f", "f32le", "pipe:1"),
    ]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_FFMPEG_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidInput(f"{where} could not be read by ffmpeg within {_FFMPEG_S:g} s") from None
    samples = np.frombuffer(done.stdout, "<f4", count=len(done.stdout) // 4)
    if samples.size == 0:
        said = loading.one_line(ValueError(done.stderr.decode(errors="replace") or "no sound came out"))
        raise InvalidInput(f"{where} is not a recording that can be read: ffmpeg: {said}")
    return samples
