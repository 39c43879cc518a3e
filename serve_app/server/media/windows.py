"""Cuts the sound of a long file into windows, at places where nobody speaks. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import InvalidRequestError
from serve_app.base.values.media import SAMPLE_RATE, Sound
from serve_app.server.media.decoder import MIN_S, SOUND_FORMATS, is_sound, seconds_of
from serve_app.server.workers.worker import grant_memory, more_memory

MAX_S = 2700.0
"""The most seconds of a file: a worker reads an MP3 from its beginning for each group of windows."""
MOST_S, LEAST_S = 30, 20
"""The most seconds of a window, as encoders of Whisper's kind take them, and the least of a window that
another one follows."""
SILENCE = 1e-3
"""The loudness (root mean square, of 1) below which a window has no speech."""

_FRAME = SAMPLE_RATE // 50
"""The samples of a fiftieth of a second, whose loudness is one number."""
_PAUSE_FRAMES = 15
"""The frames of the pause in which a window is cut, which is no gap within a word."""
_SPARE_BYTES = 2**24
_COPIES = 4
"""The copies of the samples on their way to the ingress, and those that find the cuts."""
_UNKNOWN_SIZE = 2**31 - 2**16
"""Programs that write WAV to a pipe put a size from here on into its header."""

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a file's sound, of at most MOST_S seconds."""

    start_s: float
    end_s: float
    sound: Sound


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Some windows that follow one another; those without speech are left out."""

    windows: tuple[Window, ...]
    next_start: int | None
    """The sample that the next window begins with; None behind the last window."""
    seconds: float
    """The length of the whole file."""


def group(data: bytes, start: int, n: int) -> WindowGroup:
    """The next windows of a file, `n` at most, from that sample on. With a `start` of 0, the whole file
    is checked. Raises InvalidRequestError for a file that is no sound, is cut off, or has more than MAX_S
    seconds."""
    import miniaudio

    if not is_sound(data):
        raise _bad(f"it is none of {', '.join(SOUND_FORMATS)}")
    try:
        with more_memory(_SPARE_BYTES + len(data)):
            seconds = seconds_of(data)
            if not MIN_S <= seconds <= MAX_S:
                raise _bad(f"it has {seconds:.1f} seconds, and {MIN_S} to {MAX_S:.0f} are allowed")
            if start == 0 and _is_cut_off(data, seconds):
                raise _bad("it is cut off: its header tells of more")
        grant_memory(_SPARE_BYTES + n * MOST_S * SAMPLE_RATE * 4 * _COPIES)
        samples, is_end = _read_samples(data, start, n * MOST_S * SAMPLE_RATE)
    except miniaudio.MiniaudioError as error:
        raise _bad(f"it cannot be read ({error})") from error
    if not np.isfinite(samples).all():
        raise _bad("it has samples that are no numbers")
    windows, at, n_cut = [], 0, 0
    while at < len(samples) and n_cut < n:
        end = min(at + MOST_S * SAMPLE_RATE, len(samples))
        if not is_end or end < len(samples):
            least = at + LEAST_S * SAMPLE_RATE
            end = least + _quietest(samples[least:end])
        window = samples[at:end]
        if len(window) >= MIN_S * SAMPLE_RATE and _loudness(window).max() >= SILENCE**2:
            start_s, end_s = ((start + place) / SAMPLE_RATE for place in (at, end))
            windows.append(Window(start_s, end_s, Sound.of(window.tobytes())))
        at, n_cut = end, n_cut + 1
    is_last = is_end and at == len(samples)
    return WindowGroup(tuple(windows), None if is_last else start + at, seconds)


def _bad(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The file cannot be heard: {reason}.", "file")


def _blocks(data: bytes) -> Iterator[Samples]:
    """The samples of a second each, of one channel at SAMPLE_RATE. Raises MiniaudioError."""
    import miniaudio

    stream = miniaudio.stream_memory(
        data, miniaudio.SampleFormat.FLOAT32, 1, SAMPLE_RATE, SAMPLE_RATE
    )
    return (np.frombuffer(block, np.float32) for block in stream)


def _is_cut_off(data: bytes, seconds: float) -> bool:
    """Whether a file has less than its header says. An MP3 has no such header."""
    if data[:4] == b"RIFF":
        return len(data) < int.from_bytes(data[4:8], "little") + 8 < _UNKNOWN_SIZE
    return data[:4] == b"fLaC" and sum(map(len, _blocks(data))) < (seconds - 1) * SAMPLE_RATE


def _read_samples(data: bytes, start: int, n_samples: int) -> tuple[Samples, bool]:
    """The next `n_samples` samples of a file, and whether the file ends with them."""
    n_blocks = start // SAMPLE_RATE
    left = islice(_blocks(data), n_blocks, None)
    blocks, n_kept = list[Samples](), n_blocks * SAMPLE_RATE - start
    while n_kept <= n_samples and (block := next(left, None)) is not None:
        blocks.append(block)
        n_kept += len(block)
    samples = np.concatenate([np.zeros(0, np.float32), *blocks])[start - n_blocks * SAMPLE_RATE :]
    return samples[:n_samples], len(samples) <= n_samples


def _loudness(samples: Samples) -> Samples:
    """The mean square of each stretch of _PAUSE_FRAMES frames, or of all if there are fewer."""
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    squares = np.square(frames).mean(axis=1)
    n = min(_PAUSE_FRAMES, len(squares))
    return np.convolve(squares, np.full(n, 1 / n, np.float32), "valid")


def _quietest(samples: Samples) -> int:
    """The middle of the quietest pause."""
    return (int(_loudness(samples).argmin()) + _PAUSE_FRAMES // 2) * _FRAME
