"""Decodes the sounds that clients send. Runs in workers.

Nothing is decoded before its length is known to be within the bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from serve_app.errors import InvalidRequestError
from serve_app.ingress.workers.worker import more_memory
from serve_app.types import SAMPLE_RATE, Sound

MAX_S = 600.0
"""Seconds of a request's sounds together."""
MIN_S = 0.1
"""The least seconds of a sound: shorter ones are nothing to hear."""
FORMATS = ("WAV", "MP3", "FLAC")

_BYTES_PER_SAMPLE = 16
"""The bytes per sample that decoding may take at once, its copies included."""
_SPARE_BYTES = 2**24
_MPEG_SYNC = 0xE0


def load() -> None:
    """Import what decodes: models that do not hear do without it. Raises ImportError."""
    import miniaudio  # noqa: F401


def is_sound(data: bytes) -> bool:
    """Whether a file begins like one. Source: llama.cpp, `is_audio_file` in tools/mtmd/mtmd-helper.cpp."""
    if len(data) < 12:
        return False
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_mp3 = data[:3] == b"ID3" or (data[0] == 0xFF and data[1] & _MPEG_SYNC == _MPEG_SYNC)
    return is_wav or is_mp3 or data[:4] == b"fLaC"


def decoded(data: bytes, name: str, field: str, left_s: float = MAX_S) -> Sound:
    """The sound in a file: one channel at SAMPLE_RATE, at most `left_s` seconds of it. Raises
    InvalidRequestError that begins with its name."""
    import miniaudio

    if not is_sound(data):
        raise _bad(name, f"it is none of {', '.join(FORMATS)}", field)
    try:
        with more_memory(_SPARE_BYTES + len(data)):
            seconds = _seconds(data)
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


def _seconds(data: bytes) -> float:
    import miniaudio

    readers: dict[bytes, Any] = {b"RIFF": miniaudio.wav_get_info, b"fLaC": miniaudio.flac_get_info}
    info = readers.get(data[:4], miniaudio.mp3_get_info)(data)
    return float(info.num_frames / info.sample_rate) if info.sample_rate else 0.0


def _out_of_bounds(seconds: float, left_s: float) -> str:
    if seconds < MIN_S:
        return f"it is shorter than {MIN_S} seconds"
    return f"{seconds:.1f} seconds are more than the {left_s:.0f} that are left of {MAX_S:.0f}"


def _bad(name: str, reason: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {reason}.", field)
