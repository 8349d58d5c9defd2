"""Pictures, recordings and films that are none, or are made to do harm: they cost whoever sends them a refusal.

Nothing from a request reaches a path or an address: the interpreter itself tells each file and socket that is opened.
"""

from __future__ import annotations

import base64
import io
import json
import resource
import struct
import sys
import wave
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model_worker.runtimes import films, media, pictures, recordings, registry, sources, tasks
from model_worker.runtimes.pictures import PictureReader
from model_worker.runtimes.recordings import RecordingReader
from model_worker.specs import RuntimeSpec
from shared.errors import ConfigurationError, InvalidInput, LoadError
from tests import task_cases
from tests.task_cases import Case, assert_alike, film, loaded, picture, recording, samples

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning")
RATE_HZ = 16_000
SECRET = "/etc/hostname"


def png_of(width: int, height: int, *, data: bytes | None = None) -> bytes:
    """A grey PNG of this size in a few kilobytes; `data` stands in for its pixels."""

    def block(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    if data is None:
        packer = zlib.compressobj()
        data = b"".join([*(packer.compress(bytes(width + 1)) for _ in range(height)), packer.flush()])
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", data) + block(b"IEND", b"")


def webp_of(width: int, height: int) -> bytes:
    """A WebP of one colour, of any size in 36 bytes: a single code of no bits for each channel of a pixel."""
    fields = [(width - 1, 14), (height - 1, 14), (0, 1), (0, 3), (0, 3), *[(1, 4)] * 5]
    bits = "".join(format(value, f"0{length}b")[::-1] for value, length in fields)
    packed = bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8)) + bytes(8)
    content = b"\x2f" + packed + bytes(1 - len(packed) % 2)
    chunk = b"WEBPVP8L" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(chunk)) + chunk


def saved(image_format: str, size: tuple[int, int] = (8, 8), **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, image_format, **options)
    return stream.getvalue()


def wav(count: int, *, channels: int = 1, rate_hz: int = RATE_HZ) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(np.arange(count * channels).astype("<i2").tobytes())
    return stream.getvalue()


def sound_file(values: Any, file_format: str, rate_hz: int = RATE_HZ, **options: Any) -> bytes:
    import soundfile

    stream = io.BytesIO()
    soundfile.write(stream, values, rate_hz, format=file_format, **options)
    return stream.getvalue()


# --- pictures --------------------------------------------------------------------------------------------------------

ZEROS = zlib.compress(bytes(2**30 // 8), 9)
BOMB = png_of(20_000, 20_000, data=zlib.compress(bytes(1000)))
BAD_PICTURES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a picture in any of these formats"),
    "a text": (b"hello, I am no picture", "not a picture in any of these formats"),
    "a text with a PNG's first bytes": (b"\x89PNG\r\n\x1a\nhello", "not a picture"),
    "a PNG cut off": (picture(48, 40)[:200], "not a picture that can be read"),
    "a JPEG cut off": (saved("JPEG", (64, 64))[:150], "not a picture"),
    "a GIF cut off": (saved("GIF", (64, 64))[:20], "not a picture"),
    "a PNG of 400 megapixels": (BOMB, "20000 by 20000 pixels|could be decompression bomb"),
    "a GIF of 4,000 megapixels": (b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0), "not a picture"),
    "a WEBP of 268 megapixels": (webp_of(16_383, 16_383), "16383 by 16383 pixels|could be decompression bomb"),
    "a BMP of 3,600 megapixels": (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, *[0] * 6), "pixels|bomb",
    ),
    "a PNG of one row": (png_of(20_000, 1), "no side may be more than 100 times the other"),
    "a PNG of no column": (png_of(0, 5, data=b""), "not a picture|pixels"),
    "a comment that unpacks to a hundred megabytes": (
        png_of(4, 4)[:33] + struct.pack(">I", 9 + len(ZEROS)) + b"zTXtcomment\0\0" + ZEROS + bytes(4), "not a picture",
    ),
    "PostScript, which a program would run": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "formats: AVIF"),
    "a JPEG of many scans": (saved("JPEG") + b"\xff\xda" * 200, "more than 100 scans"),
    "a TIFF whose directory is itself": (b"II*\0\x08\0\0\0" + b"\0\0" + b"\x08\0\0\0", "not a picture"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_what_is_no_picture_is_refused_in_one_line(name: str) -> None:
    data, message = BAD_PICTURES[name]
    with bounded_memory(), pytest.raises(InvalidInput, match=message) as caught:
        PictureReader().read(data, "inputs")
    assert "\n" not in caught.value.message
    assert "0x" not in caught.value.message


@contextmanager
def bounded_memory(megabytes: int = 300) -> Iterator[None]:
    """What runs inside may raise the process's high-water mark by this much at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1024


def test_a_picture_of_few_bytes_is_read_where_it_is_small() -> None:
    assert PictureReader().read(webp_of(100, 80), "inputs").size == (100, 80)
    assert PictureReader().read(png_of(100, 80), "inputs").size == (100, 80)


def test_pictures_of_one_request_share_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PIXELS_MAX", 10_000)
    small = picture(64, 64)
    with pytest.raises(InvalidInput, match=r"inputs\[2\] has 64 by 64 pixels, and there are others") as caught:
        media.decode([small, small, small], "image-classification")
    assert caught.value.detail == {"limit_pixels": 10_000}
    assert len(media.decode([small, small], "image-classification")) == 2


def test_a_picture_is_upright_in_rgb_and_of_an_animation_the_first() -> None:
    exif = Image.Exif()
    exif[274] = 6
    turned = PictureReader().read(saved("JPEG", (40, 20), exif=exif), "inputs")
    assert (turned.size, turned.mode) == ((20, 40), "RGB")
    stream = io.BytesIO()
    red, blue = Image.new("P", (8, 8), 1), Image.new("P", (8, 8), 2)
    red.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    blue.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    red.save(stream, "GIF", save_all=True, append_images=[blue])
    assert PictureReader().read(stream.getvalue(), "inputs").getpixel((0, 0)) == (255, 0, 0)


# --- recordings ------------------------------------------------------------------------------------------------------


def float_wav(values: list[float]) -> bytes:
    return sound_file(np.array(values, np.float32), "WAV", subtype="FLOAT")


BAD_RECORDINGS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a recording that can be read"),
    "a text": (b"hello, I am no sound", "not a recording that can be read"),
    "a WAV file without samples": (wav(0), "without samples"),
    "a FLAC file cut off": (sound_file(np.zeros(4000), "FLAC")[:60], "not a recording|without samples"),
    "a WAV file of another rate": (wav(100, rate_hz=44_100), "44100 samples a second, and the model takes 16000"),
    "samples that are no numbers": (float_wav([0.1, float("nan"), 0.2]), "no finite numbers"),
    "endless samples": (float_wav([0.1, float("inf")]), "no finite numbers"),
    "a playlist": (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n", "not a recording that can be read"),
}


@pytest.mark.parametrize("name", BAD_RECORDINGS)
def test_what_is_no_recording_is_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    data, message = BAD_RECORDINGS[name]
    with pytest.raises(InvalidInput, match=message) as caught:
        RecordingReader(RATE_HZ).read_file(data, "inputs")
    assert "\n" not in caught.value.message
    assert "0x" not in caught.value.message


@pytest.mark.parametrize("file_format", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_of_many_kinds_are_read(file_format: str) -> None:
    sine = (np.sin(np.arange(RATE_HZ) / 5) / 2).astype(np.float32)
    stereo = np.stack([sine, sine], axis=1)
    for values in (sine, stereo):
        read = RecordingReader(RATE_HZ).read_file(sound_file(values, file_format), "inputs")
        assert read.ndim == 1
        assert read.dtype == np.float32
        assert abs(len(read) - RATE_HZ) < 3000
        if file_format in ("WAV", "FLAC"):
            np.testing.assert_allclose(read, sine, atol=1e-3)


def test_a_header_that_claims_more_than_there_is_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = bytearray(wav(100))
    claims[40:44] = struct.pack("<I", 2**32 - 2)
    with bounded_memory():
        assert len(RecordingReader(RATE_HZ).read_file(bytes(claims), "inputs")) == 100
    monkeypatch.setattr(recordings, "SAMPLES_MAX", 5000)
    silence = sound_file(np.zeros(100_000), "FLAC")
    assert len(silence) < 5000
    with pytest.raises(InvalidInput, match="too long: all recordings of one request may have 5000 samples") as caught:
        RecordingReader(RATE_HZ).read_file(silence, "inputs")
    assert caught.value.detail == {"limit_samples": 5000}
    with pytest.raises(InvalidInput, match=r"inputs\[1\] is too long"):
        media.decode([wav(3000), wav(3000)], "audio-classification", RATE_HZ)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"raw": [], "sampling_rate": 400}, "without samples"),
        ({"raw": [float("nan")], "sampling_rate": 400}, "no finite numbers"),
        ({"raw": [1e300], "sampling_rate": 400}, "no finite numbers"),
        ({"raw": [10**400], "sampling_rate": 400}, "must be a list of numbers"),
        ({"raw": [0.1] * 40, "sampling_rate": float("nan")}, "sampling_rate must be 400, got nan"),
        ({"raw": [0.1] * 40, "sampling_rate": -400}, "sampling_rate must be 400, got -400"),
        ({"raw": [0.1] * 40, "sampling_rate": 10**30}, "sampling_rate must be 400"),
        ({"raw": [0.1] * 40, "sampling_rate": "400"}, "sampling_rate must be 400, got '400'"),
        ({"raw": [0.1] * 40}, "must be bytes, base64, or"),
        ({"raw": [0.1], "array": [0.1], "sampling_rate": 400}, "must be bytes, base64, or"),
        ({"raw": [0.1] * 40, "sampling_rate": 400, "path": SECRET}, r"inputs\.path is not read"),
    ],
)
def test_samples_that_cannot_be_meant_are_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        media.decode(value, "automatic-speech-recognition", 400)


def test_rates_that_would_take_a_huge_filter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    reader = RecordingReader(RATE_HZ)
    assert reader.read_object(recording(100, 44_100), "inputs", may_resample=True)["sampling_rate"] == 44_100
    for rate_hz in (44_099, 1):
        with pytest.raises(InvalidInput, match=f"sampling_rate {rate_hz} cannot be brought to 16000"):
            reader.read_object(recording(5000, rate_hz), "inputs", may_resample=True)
    for rate in (float("nan"), float("inf"), 0, -1, True, 44_100.5):
        with pytest.raises(InvalidInput, match="sampling_rate must be"):
            reader.read_object({"raw": [0.1], "sampling_rate": rate}, "inputs", may_resample=True)


def test_without_a_decoder_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"have headwaiter\[audio\] or ffmpeg installed on the server"):
        RecordingReader(RATE_HZ).read_file(sound_file(np.zeros(100), "FLAC"), "inputs")
    assert len(RecordingReader(RATE_HZ).read_file(wav(100), "inputs")) == 100
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match=r"have headwaiter\[images\] installed on the server"):
        PictureReader().read(picture(8, 8), "inputs")


FFMPEG = """#!/bin/sh
echo "$@" > "$0.arguments"
case "$(cat)" in
  *silence*) ;;
  *) printf '\\000\\000\\000\\077\\000\\000\\200\\077' ;;
esac
"""


def test_ffmpeg_is_told_no_name_and_may_open_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text(FFMPEG)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reader = RecordingReader(RATE_HZ)
    assert reader.read_file(b"any file of sound", "inputs").tolist() == [0.5, 1.0]
    arguments = (tmp_path / "ffmpeg.arguments").read_text()
    assert "-protocol_whitelist pipe -i pipe:0" in arguments
    # So its output is bounded as well.
    assert f"-t {recordings.SAMPLES_MAX // RATE_HZ + 1}" in arguments
    with pytest.raises(InvalidInput, match="ffmpeg: no sound came out"):
        reader.read_file(b"silence", "inputs")


# --- films -----------------------------------------------------------------------------------------------------------


def read_film(data: bytes, count: int = 4, every: int = 1) -> films.Frames:
    return films.frames(films.Film(data, "inputs"), count, every)


def test_films_are_read_and_their_pictures_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [frame.shape for frame in read_film(film(8))] == [(40, 48, 3)] * 4
    with pytest.raises(InvalidInput, match="16 are wanted from its first 16, and 8 of these are there"):
        read_film(film(8), 16)
    with pytest.raises(InvalidInput, match="num_frames times frame_sampling_rate is 1000000; at most"):
        read_film(film(8), 1000, 1000)
    monkeypatch.setattr(films, "PIXELS_MAX", 4 * 48 * 40 - 1)
    with pytest.raises(InvalidInput, match="pictures of 48 by 40 pixels; the 4 that the model looks at"):
        read_film(film(8))


def test_what_only_names_films_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "film.mp4").write_bytes(film(8))
    monkeypatch.chdir(tmp_path)
    address = "http://127.0.0.1:9/film.mp4"
    lists = [
        b"ffconcat version 1.0\nfile film.mp4\n",
        f"ffconcat version 1.0\nfile {tmp_path}/film.mp4\n".encode(),
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{tmp_path}/film.mp4\n#EXT-X-ENDLIST\n".encode(),
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{address}\n#EXT-X-ENDLIST\n".encode(),
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
        b"", b"hello", film(8)[:100], str(tmp_path / "film.mp4").encode(),
    ]  # fmt: skip
    for data in lists:
        with pytest.raises(InvalidInput, match=r"not a film that can be read|without pictures"):
            read_film(data)


# --- every task ------------------------------------------------------------------------------------------------------

NAMES = (
    "http://127.0.0.1:9/a.png", "https://127.0.0.1:9/a.wav", "file:///etc/hostname", SECRET, "../../etc/hostname",
    "data:image/png;url,http://127.0.0.1:9/a.png", "ftp://127.0.0.1/a", "\\\\127.0.0.1\\a",
)  # fmt: skip


def parts(name: str) -> list[dict[str, Any]]:
    """Whatever may stand in a message in place of a picture, a recording or a film."""
    return [
        {"type": "image", "url": name}, {"type": "image", "path": name}, {"type": "image", "image": name},
        {"type": "image", "base64": name}, {"type": "image_url", "image_url": {"url": name}},
        {"type": "image_url", "image_url": name}, {"type": "audio", "audio": name}, {"type": "audio", "url": name},
        {"type": "input_audio", "input_audio": {"data": name}}, {"type": "video", "video": name},
        {"type": "video", "url": name}, {"type": "video", "path": name}, {"type": "text", "text": "a", "url": name},
        {"type": "image", "image": {"url": name}}, {"type": "image", "image": {"bytes": None, "path": name}},
    ]  # fmt: skip


def chats(name: str) -> list[Any]:
    return [[{"role": "user", "content": [{"type": "text", "text": "?"}, part]}] for part in parts(name)]


MEDIA_INPUTS: dict[str, Callable[[str], list[Any]]] = {
    **dict.fromkeys(
        sorted(media.IMAGE_TASKS - {media.DOCUMENT_TASK, media.LABELLED_PICTURE_TASK, "keypoint-matching"}),
        lambda name: [name, [name], [[name]], {"image": name}, {"url": name}, [picture(8, 8), name]],
    ),
    **dict.fromkeys(
        sorted(media.AUDIO_TASKS),
        lambda name: [name, [name], {"path": name}, {"raw": name, "sampling_rate": 400}, {"url": name}],
    ),
    "video-classification": lambda name: [name, [name], {"path": name}, {"video": name}],
    "keypoint-matching": lambda name: [[name, name], [[name, name]], [picture(8, 8), name]],
    media.LABELLED_PICTURE_TASK: lambda name: [{"image": name, "candidate_labels": ["a"]}, name],
    media.DOCUMENT_TASK: lambda name: [
        {"image": name, "question": "?"}, [{"image": name, "question": "?"}], name,
        {"image": {"path": name}, "question": "?"}, {"image": [name], "question": "?"},
    ],
    "image-text-to-text": lambda name: [
        {"images": name, "text": "a"}, {"images": [name], "text": "a"}, {"images": [[name]], "text": ["a"]},
        {"image": name, "text": "a"}, {"url": name, "text": "a"}, {"text": chats(name)[0]}, *chats(name),
        [chats(name)[0]],
    ],
    "any-to-any": lambda name: [
        {"text": "a", "images": name}, {"text": "a", "audio": name}, {"text": "a", "audio": [name]},
        {"text": "a", "videos": name}, {"text": "a", "video": name}, {"text": "a", "path": name}, *chats(name),
        [chats(name)[0]],
    ],
    "text-to-audio": lambda name: [*chats(name), [chats(name)[0]], {"text": name}],
    "decision": lambda name: [
        {"state": "", "questions": {}, "assets": {"a": name}},
        {"state": "", "questions": {}, "assets": {"a": {"data_base64": name}}},
        json.dumps({"state": "", "questions": {}, "assets": {"a": name}}),
    ],
}  # fmt: skip


def test_every_task_with_media_is_looked_at() -> None:
    assert set(MEDIA_INPUTS) | {"table-question-answering"} == set(tasks.PIPELINE_TASKS) - {
        *("text-classification", "token-classification", "fill-mask", "zero-shot-classification", "feature-extraction")
    }


class Watch:
    """Hears of each file, program and connection that Python code opens. A hook stays for good, so there is one."""

    def __init__(self) -> None:
        self.is_on = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
            self.heard.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize("task", MEDIA_INPUTS)
def test_no_task_opens_what_a_request_names(task: str, watch: Watch) -> None:
    for name in NAMES:
        for inputs in MEDIA_INPUTS[task](name):
            watch.heard.clear()
            watch.is_on = True
            try:
                with pytest.raises(InvalidInput):
                    media.decode(inputs, task, 400)
            finally:
                watch.is_on = False
            assert not [line for line in watch.heard if "127.0.0.1" in line or "etc" in line], inputs


@pytest.mark.parametrize("case", task_cases.CASES, ids=lambda case: case.id)
def test_no_pipeline_opens_anything_for_a_request_that_names_files(case: Case, watch: Watch) -> None:
    """The same behind the reader: a whole request goes through the task's own pipeline, in words and in its bytes."""
    model = loaded(case.task, case.kind, case.labels)
    watch.heard.clear()
    watch.is_on = True
    try:
        for named in (SECRET, "http://127.0.0.1:9/a.png"):
            for inputs in (
                named, [named], {"text": named, "images": named}, {"question": named, "context": named},
                base64.b64encode(named.encode()).decode(), named.encode(), {"table": {named: [named]}, "query": named},
                {"state": named, "questions": {"a": {"type": "noul", "instructions": named}}},
                {"question": named, "word_boxes": [[named, [0, 0, 1, 1]]]},
            ):  # fmt: skip
                try:
                    model.finish(model.forward([model.prepare(inputs, dict(case.parameters))])[0])
                except InvalidInput:
                    continue
    finally:
        watch.is_on = False
    assert not [line for line in watch.heard if "127.0.0.1" in line or SECRET in line]


@pytest.mark.parametrize(
    "case", [case for case in task_cases.CASES if case.batches and case.task in media.IMAGE_TASKS | media.AUDIO_TASKS],
    ids=lambda case: case.id,
)  # fmt: skip
def test_a_bad_medium_costs_its_sender_alone(case: Case) -> None:
    model = loaded(case.task, case.kind, case.labels)
    good = [model.prepare(each, dict(case.parameters)) for each in case.inputs]
    alone = [model.finish(model.forward([item])[0]) for item in good]
    hostile: list[Any] = [data for data, _ in (*BAD_PICTURES.values(), *BAD_RECORDINGS.values())]
    if case.task == media.LABELLED_PICTURE_TASK:
        hostile = [{"image": data, "candidate_labels": ["a"]} for data in hostile]
    for each in hostile:
        with pytest.raises(InvalidInput):
            model.prepare(each, dict(case.parameters))
    again = [model.prepare(each, dict(case.parameters)) for each in case.inputs]
    assert_alike([model.finish(output) for output in model.forward(again)], alone)


# --- shapes and parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "word"),
    [
        ([0, 0, 1001, 5], "a"), ([-1, 0, 5, 5], "a"), ([5, 0, 1, 5], "a"), ([0, 5, 5, 1], "a"), ([0, 0, 5], "a"),
        ([0, 0, 5, float("nan")], "a"), ([0, 0, 5, True], "a"), ([0, 0, 5, "5"], "a"), ([0, 0, 5, 5], 5),
    ],
)  # fmt: skip
def test_places_that_a_model_would_look_up_in_vain_are_refused(box: list[Any], word: Any) -> None:
    with pytest.raises(InvalidInput, match=r"inputs\.word_boxes\[0\] must be \[word, \[left, top, right, bottom\]\]"):
        media.decode({"question": "?", "word_boxes": [[word, box]]}, media.DOCUMENT_TASK)


@pytest.mark.parametrize(
    ("task", "inputs", "message"),
    [
        ("image-classification", 5, "inputs must be bytes or base64, got 5"),
        ("image-classification", [], "inputs is an empty list"),
        ("keypoint-matching", [picture(8, 8)], "inputs must be a list of two pictures"),
        (media.DOCUMENT_TASK, {"question": "?"}, "neither image nor word_boxes"),
        (media.DOCUMENT_TASK, {"question": "?", "url": "a"}, r"inputs\.url is not read"),
        (media.DOCUMENT_TASK, {"image": picture(8, 8)}, "has no question"),
        (media.DOCUMENT_TASK, {"question": 5, "word_boxes": task_cases.BOXES}, r"inputs\.question must be a string"),
        (media.LABELLED_PICTURE_TASK, {"image": picture(8, 8)}, "has no candidate_labels"),
        (media.LABELLED_PICTURE_TASK, {"image": picture(8, 8), "candidate_labels": ["a"] * 257}, "257; at most 256"),
        ("table-question-answering", {"query": "?", "table": {"a": ["1"], "b": []}}, "empty list"),
        ("table-question-answering", {"query": "?", "table": {"a": ["1"], "b": ["1", "2"]}}, "different lengths"),
        ("table-question-answering", {"query": "?", "table": {"a": [1]}}, r"table\.a\[0\] must be a string, got 1"),
        ("table-question-answering", {"query": "?", "table": {"a": ["1"] * 5000}}, "5000 cells; one table may have"),
        ("table-question-answering", {"query": "?", "table": []}, "must be an object of columns"),
        ("text-to-audio", 5, "inputs must be a string or a list of messages"),
        ("any-to-any", {"text": "a", "size": {"height": 10**6}}, r"inputs\.size is not read"),
        ("image-text-to-text", {"images": picture(8, 8)}, "has no text"),
        ("image-text-to-text", [{"role": "user"}], "must be a message with role and content"),
    ],
)
def test_inputs_of_another_shape_are_refused_by_name(task: str, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        media.decode(inputs, task)


@pytest.mark.parametrize(
    ("kind", "task", "inputs", "parameters", "message"),
    [
        ("layoutlm", media.DOCUMENT_TASK, {"question": "?", "word_boxes": task_cases.BOXES}, {"lang": "../../etc/x"},
         "lang must be the names of languages"),
        ("layoutlm", media.DOCUMENT_TASK, {"question": "?", "word_boxes": task_cases.BOXES},
         {"max_seq_len": 10**9, "padding": "max_length"}, "max_seq_len must be at most 64"),
        ("layoutlm", media.DOCUMENT_TASK, {"question": "?", "word_boxes": task_cases.BOXES},
         {"tesseract_config": "-c tessedit_write_images=1"}, "unknown parameter 'tesseract_config'"),
        ("videomae", "video-classification", film(), {"num_frames": 10**9}, "num_frames must be at most 4096"),
        ("videomae", "video-classification", film(), {"frame_sampling_rate": 0}, "frame_sampling_rate must be"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition", recording(900, 400), {"chunk_length_s": float("nan")},
         "chunk_length_s must be a number"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition", recording(900, 400), {"stride_length_s": [1, "x"]},
         r"stride_length_s\[1\] must be a number"),
    ],
)  # fmt: skip
def test_parameters_that_would_do_harm_are_refused_by_name(
    kind: str, task: str, inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        loaded(task, kind).prepare(inputs, parameters)


def test_a_recording_in_a_million_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.runtimes.staging._PREPARED_BYTES_MAX", 50_000)
    model = loaded("automatic-speech-recognition", "Wav2Vec2ForCTC")
    model.prepare(recording(4000, 400), {"chunk_length_s": 1.0, "stride_length_s": 0.0})
    with pytest.raises(InvalidInput, match="more than 50000 bytes once they are prepared"):
        model.prepare(recording(4000, 400), {"chunk_length_s": 1.0, "stride_length_s": 0.45})


def test_parts_of_the_inputs_may_be_parameters() -> None:
    document, boxes = loaded(media.DOCUMENT_TASK, "layoutlm"), {"word_boxes": task_cases.BOXES}
    one, other = document.prepare({"question": "?", **boxes}, {}), document.prepare({"question": "?"}, dict(boxes))
    assert document.finish(document.forward([one])[0]) == document.finish(document.forward([other])[0])
    detector, labels = loaded(media.LABELLED_PICTURE_TASK, "owlvit"), {"candidate_labels": ["a", "b"]}
    one, other = detector.prepare({"image": picture(8, 8), **labels}, {}), detector.prepare(picture(8, 8), dict(labels))
    assert detector.finish(detector.forward([one])[0]) == detector.finish(detector.forward([other])[0])


def test_data_urls_and_openai_parts_are_read() -> None:
    encoded = base64.b64encode(picture(8, 8)).decode()
    for inputs in (encoded, f"data:image/png;base64,{encoded}"):
        assert media.decode(inputs, "image-classification").size == (8, 8)
    chat = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}]}
    ]
    [message] = media.decode(chat, "image-text-to-text")
    assert message["content"][0]["image"].size == (8, 8)
    chat = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": wav(100)}}]}]
    [message] = media.decode(chat, "any-to-any", RATE_HZ)
    assert message["content"][0]["audio"].shape == (100,)
    assert media.decode({"text": "a", "audio": samples(50)}, "any-to-any", RATE_HZ)["audio"].shape == (50,)


@pytest.mark.parametrize(
    ("task", "package", "remedy"),
    [
        ("image-classification", "PIL", r"headwaiter\[images\]"),
        ("video-classification", "av", r"headwaiter\[video\]"),
        ("table-question-answering", "pandas", r"headwaiter\[tables\]"),
        ("mask-generation", "torchvision", "the torchvision that goes with the installed torch"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_loaded(
    task: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    with pytest.raises(
        ConfigurationError, match=f"task = '{task}' needs the package '{package}', .*: install {remedy}"
    ):
        tasks.check_packages(task)
    tasks.check_packages("text-classification")


def test_check_and_load_name_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RuntimeSpec("tiny", str(task_cases.directory("vit")), "image-classification")
    assert sources.check(spec)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"install headwaiter\[images\]"):
        sources.check(spec)
    with pytest.raises(LoadError, match=r"install headwaiter\[images\]") as caught:
        registry.build(spec)
    assert caught.value.permanent
