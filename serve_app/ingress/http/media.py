"""Refuses what is not text in a message, by its name."""

from __future__ import annotations

from collections.abc import Set

from serve_app.errors import InvalidRequestError, MediaError

_KINDS = {
    "image": "Image",
    "image_url": "Image",
    "input_image": "Image",
    "audio": "Audio",
    "audio_url": "Audio",
    "input_audio": "Audio",
    "video": "Video",
    "video_url": "Video",
    "input_video": "Video",
    "document": "Document",
    "file": "File",
    "input_file": "File",
    "search_result": "Search result",
}


_MEDIA = frozenset({"Image", "Audio", "Video"})


def refuse(parts: object, field: str, takes: Set[str] = frozenset()) -> None:
    """Raises MediaError or, for files, InvalidRequestError, in llama-server's words, if a message has a
    part that is no text, but for the types that it `takes`. Anything but a list of parts is not
    looked at."""
    for part in parts if isinstance(parts, list) else ():
        name = part.get("type") if isinstance(part, dict) else None
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is not None and name not in takes:
            error = MediaError if kind in _MEDIA else InvalidRequestError
            raise error(
                f"{kind} input is not supported: a message has a part of the type {name!r}.",
                field,
            )
