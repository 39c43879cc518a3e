"""Pictures in prompts: where they stand, and which they are. Runs in workers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from serve_app.errors import InvalidRequestError, MediaError, PicturesWantedError
from serve_app.ingress.workers import pictures
from serve_app.types import PICTURE, Picture


class Marks:
    """Stands for pictures in one chat's text, through its template: digits, which no user foresees."""

    def __init__(self) -> None:
        self._secret = f"{secrets.randbelow(10**12):012}"
        self._n = 0
        self.pattern = re.compile(rf"{self._secret}<(\d+)>")
        """Finds them; the group is the picture's number."""

    def next(self) -> str:
        """The mark of the next picture."""
        self._n += 1
        return f"{self._secret}<{self._n - 1}>"


def refusal(field: str) -> MediaError:
    """The error for pictures to models that read text only."""
    return MediaError(
        "Image input is not supported: this model reads text only, as it has no projector.", field
    )


def placed(
    prompt: tuple[int, ...], urls: Sequence[str], field: str
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """The prompt with PICTURE in the place of -1 for the first picture, -2 for the second and so on, and
    the pictures in the prompt's order. Raises InvalidRequestError."""
    if not urls:
        return prompt, ()
    numbers = [-1 - token for token in prompt if token < 0]
    if sorted(numbers) != list(range(len(urls))):
        raise InvalidRequestError("The model's chat template does not keep pictures.", field)
    found = read(urls, field)
    tokens = tuple(PICTURE if token < 0 else token for token in prompt)
    return tokens, tuple(found[number] for number in numbers)


def read(urls: Sequence[str], field: str) -> list[Picture]:
    """The pictures at these URLs. Raises InvalidRequestError that names the bad one, and
    PicturesWantedError for all that are to be fetched."""
    if len(urls) > pictures.MAX_PICTURES:
        raise InvalidRequestError(
            f"{len(urls)} pictures: a request may have {pictures.MAX_PICTURES}.", field
        )
    names = [f"Picture {number} of {len(urls)}" for number in range(1, len(urls) + 1)]
    if wanting := [one for one in zip(urls, names, strict=True) if pictures.is_wanting(one[0])]:
        raise PicturesWantedError(field, wanting)
    found: list[Picture] = []
    n_bytes = 0
    for url, name in zip(urls, names, strict=True):
        found.append(pictures.from_url(url, name, field))
        n_bytes += len(found[-1].pixels)
        if n_bytes > pictures.MAX_BYTES:
            raise InvalidRequestError(f"{name}: all up to this one are too large together.", field)
    return found
