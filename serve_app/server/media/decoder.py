"""Decodes the pictures and sounds of a request, within bounds on all of them together. Runs in workers.

Nothing is decoded before its header says that it is within the bounds.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve_app.base.errors import InvalidRequestError, PicturesWantedError
from serve_app.base.values.media import SAMPLE_RATE, Medium, Picture, Sound
from serve_app.kernels.llama.vision.senses import NO_SENSES
from serve_app.server.answering.preparation import check_medium
from serve_app.server.model_registry import ModelFile, ModelInfo
from serve_app.server.workers.worker import files_at_hand, grant_memory, more_memory

MAX_PIXELS = 2**24
MAX_SIDE = 2048
"""Larger pictures are shrunk: no projector sees more."""
MAX_BYTES = 64 * 2**20
"""The most bytes of a request's pictures together, decoded and shrunk."""
MAX_PICTURES = 16
MAX_S = 600.0
MIN_S = 0.1
"""The least seconds of a sound: shorter ones are nothing to hear."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SOUND_FORMATS = ("WAV", "MP3", "FLAC")

_BYTES_PER_PIXEL = 12
"""The bytes per pixel that decoding, turning and converting may take at once."""
_BYTES_PER_SAMPLE = 16
"""The bytes per sample that decoding may take at once, its copies included."""
_SPARE_BYTES = 2**24
_COPIES = 4
"""The copies of a decoded picture on its way to the ingress: itself, and packed, which grows."""
_MPEG_SYNC = 0xE0
_PICTURE, _SOUND = "Picture", "Sound"


def is_wanting(url: str) -> bool:
    return url.partition(":")[0].lower() in ("http", "https") and url not in files_at_hand()


def from_url(url: str, name: str, field: str) -> bytes:
    """The file in a data URL, or that was fetched for it. Raises InvalidRequestError that begins with its
    name."""
    if (file := files_at_hand().get(url)) is not None:
        return bytes(file)
    scheme, _, rest = url.partition(":")
    head, comma, data = rest.partition(",")
    if scheme.lower() != "data" or not comma or not head.lower().endswith(";base64"):
        raise _bad(name, "it is no data URL (data:image/png;base64,…)", field)
    return from_base64(data, name, field)


def from_base64(text: str, name: str, field: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _bad(name, "it is not base64", field) from None


def decode_picture(data: bytes, name: str, field: str) -> Picture:
    """The picture in a file: turned as its EXIF data says, and at most MAX_SIDE wide and high. Raises
    InvalidRequestError that begins with its name."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about broken metadata, and bombs: the bound is ours
            with more_memory(_SPARE_BYTES), Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    message = f"{width} x {height} pixels are more than {MAX_PIXELS}"
                    raise _bad(name, message, field)
                with more_memory(width * height * _BYTES_PER_PIXEL):
                    return _read_picture(image)
    except (InvalidRequestError, MemoryError):
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise _bad(name, f"it is none of {kinds}", field) from None
    except Exception as error:  # a damaged file may have the decoders raise anything
        raise _bad(name, f"it cannot be read ({error})", field) from error


def _read_picture(image: Any) -> Picture:
    from PIL import Image, ImageOps

    image.draft("RGB", (MAX_SIDE, MAX_SIDE))  # a JPEG can be read smaller
    turned = ImageOps.exif_transpose(image).convert("RGB")
    if max(turned.size) > MAX_SIDE:
        turned.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    pixels = turned.tobytes()
    grant_memory(_COPIES * len(pixels))
    return Picture.of(pixels, *turned.size)


def _bad(name: str, reason: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {reason}.", field)


def is_sound(data: bytes) -> bool:
    """Whether a file begins like one. Source: llama.cpp, `is_audio_file` in tools/mtmd/mtmd-helper.cpp."""
    if len(data) < 12:
        return False
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_mp3 = data[:3] == b"ID3" or (data[0] == 0xFF and data[1] & _MPEG_SYNC == _MPEG_SYNC)
    return is_wav or is_mp3 or data[:4] == b"fLaC"


def decoded_sound(data: bytes, name: str, field: str, left_s: float = MAX_S) -> Sound:
    """The sound in a file: one channel at SAMPLE_RATE, at most `left_s` seconds of it. Raises
    InvalidRequestError that begins with its name."""
    import miniaudio

    if not is_sound(data):
        raise _bad(name, f"it is none of {', '.join(SOUND_FORMATS)}", field)
    try:
        with more_memory(_SPARE_BYTES + len(data)):
            seconds = seconds_of(data)
        if not MIN_S <= seconds <= left_s:
            raise _bad(name, _out_of_bounds(seconds, left_s), field)
        with more_memory(_SPARE_BYTES + int(seconds * SAMPLE_RATE) * _BYTES_PER_SAMPLE):
            found = miniaudio.decode(data, miniaudio.SampleFormat.FLOAT32, 1, SAMPLE_RATE)
            samples = np.frombuffer(found.samples, np.float32)
    except miniaudio.MiniaudioError as error:
        raise _bad(name, f"it cannot be read ({error})", field) from error
    if not MIN_S * SAMPLE_RATE <= len(samples) <= (left_s + 1) * SAMPLE_RATE:
        raise _bad(name, _out_of_bounds(len(samples) / SAMPLE_RATE, left_s), field)
    if not np.isfinite(samples).all():
        raise _bad(name, "it has samples that are no numbers", field)
    return Sound.of(samples.tobytes())


def seconds_of(data: bytes) -> float:
    """The length of a sound, by its headers. Raises MiniaudioError."""
    import miniaudio

    readers: dict[bytes, Any] = {b"RIFF": miniaudio.wav_get_info, b"fLaC": miniaudio.flac_get_info}
    info = readers.get(data[:4], miniaudio.mp3_get_info)(data)
    return float(info.num_frames / info.sample_rate) if info.sample_rate else 0.0


def _out_of_bounds(seconds: float, left_s: float) -> str:
    if seconds < MIN_S:
        return f"it is shorter than {MIN_S} seconds"
    return f"{seconds:.1f} seconds are more than the {left_s:.0f} that are left of {MAX_S:.0f}"


@dataclass(frozen=True, slots=True)
class MediaDecoder:
    """Decodes what a model's projector takes. Runs in workers."""

    sees: bool = False
    hears: bool = False

    def load(self) -> None:
        """Load the libraries that decode, before workers are forked."""
        if self.sees:
            from PIL import Image

            Image.preinit()
            Image.init()
        if self.hears:
            import miniaudio  # noqa: F401

    def decode(self, urls: Sequence[str], field: str) -> list[Medium]:
        """The pictures and sounds at these URLs. Raises InvalidRequestError that names the bad one,
        PicturesWantedError for all that are to be fetched, and MediaError like `check_medium`."""
        if len(urls) > MAX_PICTURES:
            raise InvalidRequestError(
                f"The request has {len(urls)} pictures and sounds. At most {MAX_PICTURES} are "
                "allowed.",
                field,
            )
        names = [f"{_kind(url)} {number} of {len(urls)}" for number, url in enumerate(urls, 1)]
        if wanting := [one for one in zip(urls, names, strict=True) if is_wanting(one[0])]:
            raise PicturesWantedError(field, wanting)
        media: list[Medium] = []
        n_bytes, left_s = 0, MAX_S
        for url, name in zip(urls, names, strict=True):
            data = from_url(url, name, field)
            hearable = is_sound(data) or name.startswith(_SOUND)
            check_medium(self, hearable, field)
            if hearable:
                sound = decoded_sound(data, name.replace(_PICTURE, _SOUND), field, left_s)
                left_s -= sound.size[0] / SAMPLE_RATE
                media.append(sound)
                continue
            picture = decode_picture(data, name, field)
            media.append(picture)
            n_bytes += len(picture.pixels)
            if n_bytes > MAX_BYTES:
                raise InvalidRequestError(
                    f"{name}: all up to this one are too large together.", field
                )
        return media


def open_model(file: ModelFile) -> ModelInfo:
    """Read a model's vocabulary, with a decoder of the media that the model takes. Raises ConfigError."""
    return ModelInfo.open(file, None if file.senses == NO_SENSES else MediaDecoder(*file.senses))


def _kind(url: str) -> str:
    return _SOUND if url[:11].lower() == "data:audio/" else _PICTURE
