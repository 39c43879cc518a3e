"""Pictures and sounds in prompts: where they stand, and which they are. Runs in workers."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.errors import InvalidRequestError, MediaError, PicturesWantedError
from serve_app.ingress.media import pictures, sounds
from serve_app.ingress.model_registry import ModelInfo
from serve_app.types import MEDIUM, SAMPLE_RATE, Medium

_PICTURE, _SOUND = "Picture", "Sound"


def check(model: ModelInfo, is_sound: bool, field: str) -> None:
    """Raises MediaError for what a model has no projector for."""
    if is_sound and not model.hears:
        raise MediaError(
            "Audio input is not supported: this model has no projector for sound.", field
        )
    if not is_sound and not model.sees:
        reads = (
            "hears, and does not see" if model.hears else "reads text only, as it has no projector"
        )
        raise MediaError(f"Image input is not supported: this model {reads}.", field)


def placed(
    model: ModelInfo, prompt: tuple[int, ...], urls: Sequence[str], field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    """The prompt with MEDIUM in the place of -1 for the first picture or sound, -2 for the second and so
    on, and these in the prompt's order. Raises InvalidRequestError."""
    if not urls:
        return prompt, ()
    numbers = [-1 - token for token in prompt if token < 0]
    if sorted(numbers) != list(range(len(urls))):
        raise InvalidRequestError("The model's chat template does not keep pictures.", field)
    found = read(model, urls, field)
    tokens = tuple(MEDIUM if token < 0 else token for token in prompt)
    return tokens, tuple(found[number] for number in numbers)


def read(model: ModelInfo, urls: Sequence[str], field: str) -> list[Medium]:
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
    found: list[Medium] = []
    n_bytes, left_s = 0, sounds.MAX_S
    for url, name in zip(urls, names, strict=True):
        data = pictures.from_url(url, name, field)
        is_sound = sounds.is_sound(data) or name.startswith(_SOUND)
        check(model, is_sound, field)
        if is_sound:
            sound = sounds.decoded(data, name.replace(_PICTURE, _SOUND), field, left_s)
            left_s -= sound.size[0] / SAMPLE_RATE
            found.append(sound)
            continue
        picture = pictures.decoded(data, name, field)
        found.append(picture)
        n_bytes += len(picture.pixels)
        if n_bytes > pictures.MAX_BYTES:
            raise InvalidRequestError(f"{name}: all up to this one are too large together.", field)
    return found


def _kind(url: str) -> str:
    return _SOUND if url[:11].lower() == "data:audio/" else _PICTURE
