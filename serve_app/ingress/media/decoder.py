"""Decodes the pictures and sounds of a request, within bounds on all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.errors import InvalidRequestError, MediaError, PicturesWantedError
from serve_app.ingress.media import pictures, sounds
from serve_app.llama.vision.senses import NO_SENSES, Senses
from serve_app.types import SAMPLE_RATE, Medium

_PICTURE, _SOUND = "Picture", "Sound"


@dataclass(frozen=True, slots=True)
class MediaDecoder:
    """Decodes what a model's projector takes. Runs in workers."""

    sees: bool = False
    hears: bool = False

    @classmethod
    def of(cls, senses: Senses) -> MediaDecoder | None:
        """The decoder for a projector with these senses; None without any."""
        return None if senses == NO_SENSES else cls(*senses)

    def load(self) -> None:
        """Import the libraries that decode. Raises ImportError."""
        if self.sees:
            pictures.load()
        if self.hears:
            sounds.load()

    def check(self, is_sound: bool, field: str) -> None:
        """Raises MediaError for a kind that the projector is not for."""
        if is_sound and not self.hears:
            raise MediaError(
                "Audio input is not supported: this model has no projector for sound.", field
            )
        if not is_sound and not self.sees:
            raise MediaError(
                "Image input is not supported: this model hears, and does not see.", field
            )

    def decode(self, urls: Sequence[str], field: str) -> list[Medium]:
        """The pictures and sounds at these URLs. Raises InvalidRequestError that names the bad one,
        PicturesWantedError for all that are to be fetched, and MediaError like `check`."""
        if len(urls) > pictures.MAX_PICTURES:
            raise InvalidRequestError(
                f"The request has {len(urls)} pictures and sounds. At most {pictures.MAX_PICTURES} are "
                "allowed.",
                field,
            )
        names = [f"{_kind(url)} {number} of {len(urls)}" for number, url in enumerate(urls, 1)]
        if wanting := [one for one in zip(urls, names, strict=True) if pictures.is_wanting(one[0])]:
            raise PicturesWantedError(field, wanting)
        media: list[Medium] = []
        n_bytes, left_s = 0, sounds.MAX_S
        for url, name in zip(urls, names, strict=True):
            data = pictures.from_url(url, name, field)
            is_sound = sounds.is_sound(data) or name.startswith(_SOUND)
            self.check(is_sound, field)
            if is_sound:
                sound = sounds.decoded(data, name.replace(_PICTURE, _SOUND), field, left_s)
                left_s -= sound.size[0] / SAMPLE_RATE
                media.append(sound)
                continue
            picture = pictures.decoded(data, name, field)
            media.append(picture)
            n_bytes += len(picture.pixels)
            if n_bytes > pictures.MAX_BYTES:
                raise InvalidRequestError(
                    f"{name}: all up to this one are too large together.", field
                )
        return media


def _kind(url: str) -> str:
    return _SOUND if url[:11].lower() == "data:audio/" else _PICTURE
