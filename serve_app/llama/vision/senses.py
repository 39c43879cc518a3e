"""The senses that a projector is for, by its file's metadata: llama.cpp need not load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFReader

from serve_app.errors import ConfigError


class Senses(NamedTuple):
    """The kinds of media that a model takes."""

    sees: bool = False
    """Pictures."""
    hears: bool = False
    """Sounds."""


NO_SENSES = Senses()


# Steps of a half minute in encoders of Whisper's kind, and projectors that stack several of them.
_N_STEPS = 1500
_STACKING = ("ultravox", "meralion")


def senses(path: Path) -> Senses:
    """The senses of a projector's file, whose weights may be missing. Raises ConfigError if it is none."""
    reader = reader_of(path)
    return Senses(*(bool(value(reader, f"clip.has_{one}_encoder")) for one in ("vision", "audio")))


def check_counts(path: Path) -> None:
    """Raises ConfigError for a projector of which llama.cpp counts the embeddings of a sound wrongly: it
    would end the whole process at the first one (`clip_n_output_tokens` in tools/mtmd/clip.cpp)."""
    reader = reader_of(path)
    kind = value(reader, "clip.audio.projector_type") or value(reader, "clip.projector_type")
    n_stacked = value(reader, "clip.audio.projector.stack_factor")
    if kind in _STACKING and n_stacked and _N_STEPS % n_stacked:
        raise ConfigError(
            f"The projector {path} stacks {n_stacked} steps of a sound, of which llama.cpp counts the last "
            "ones wrongly. It would end the engine at the first sound."
        )


def reader_of(path: Path) -> GGUFReader:
    """Raises ConfigError if it is no GGUF file."""
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"The projector {path} cannot be read: {error}") from error


def value(reader: GGUFReader, name: str) -> Any:
    """None if the file has none of that name."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
