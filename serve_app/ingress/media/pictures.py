"""Decodes the pictures that clients send. Runs in workers.

Nothing is decoded before its header says that it is within the bounds.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from serve_app.errors import InvalidRequestError
from serve_app.ingress.workers.worker import Models, Work, grant_memory, more_memory
from serve_app.types import Picture

MAX_PIXELS = 2**24
"""The most pixels of one picture."""
MAX_SIDE = 2048
"""Larger pictures are shrunk: no projector sees more."""
MAX_BYTES = 64 * 2**20
"""The most bytes of a request's pictures together, decoded and shrunk."""
MAX_PICTURES = 16
"""The most pictures and sounds of one request."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

_BYTES_PER_PIXEL = 12
"""The bytes per pixel that decoding, turning and converting may take at once."""
_SPARE_BYTES = 2**24
_COPIES = 4
"""The copies of a decoded picture on its way to the ingress: itself, and packed, which grows."""
_NO_FILES: Mapping[str, memoryview] = {}
_files: ContextVar[Mapping[str, memoryview]] = ContextVar("files", default=_NO_FILES)
"""The files that were fetched for the present body, by URL."""


def load() -> None:
    """Import what decodes: models without a projector do without it. Raises ImportError."""
    from PIL import Image

    Image.preinit()
    Image.init()


class WithFiles:
    """Work on a body behind which the files are that were fetched for it: it finds them by their URLs."""

    def __init__(self, work: Work, sizes: Sequence[tuple[str, int]]) -> None:
        """`sizes` are the files' URLs and numbers of bytes, in their order."""
        self.work, self._sizes = work, tuple(sizes)
        # What it is called where it fails.
        self.__module__, self.__qualname__ = work.__module__, work.__qualname__

    def __call__(self, models: Models, body: bytes) -> Any:
        """The result of the work, which finds its files."""
        files: dict[str, memoryview] = {}
        end = len(body)
        for url, n_bytes in reversed(self._sizes):
            files[url] = memoryview(body)[end - n_bytes : end]
            end -= n_bytes
        token = _files.set(files)
        try:
            return self.work(models, body[:end])
        finally:
            _files.reset(token)


def is_wanting(url: str) -> bool:
    """Whether it would have to be fetched."""
    return url.partition(":")[0].lower() in ("http", "https") and url not in _files.get()


def from_url(url: str, name: str, field: str) -> bytes:
    """The file in a data URL, or that was fetched for it. Raises InvalidRequestError that begins with its
    name."""
    if (file := _files.get().get(url)) is not None:
        return bytes(file)
    scheme, _, rest = url.partition(":")
    head, comma, data = rest.partition(",")
    if scheme.lower() != "data" or not comma or not head.lower().endswith(";base64"):
        raise _bad(name, "it is no data URL (data:image/png;base64,…)", field)
    return from_base64(data, name, field)


def from_base64(text: str, name: str, field: str) -> bytes:
    """The file in base64. Raises InvalidRequestError that begins with its name."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _bad(name, "it is not base64", field) from None


def decoded(data: bytes, name: str, field: str) -> Picture:
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
                    return _read(image)
    except (InvalidRequestError, MemoryError):
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise _bad(name, f"it is none of {kinds}", field) from None
    except Exception as error:  # a damaged file may have the decoders raise anything
        raise _bad(name, f"it cannot be read ({error})", field) from error


def _read(image: Any) -> Picture:
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
