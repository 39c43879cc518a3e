"""Pictures and sounds that are decoded. Plain, frozen, and small to send."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

MEDIUM = -1
"""Stands in a prompt for the next one of its pictures and sounds. No vocabulary has negative tokens."""


SAMPLE_RATE = 16_000
"""Samples of a second of sound: as many as models that hear are made for."""


Size = tuple[int, ...]
"""Width and height of a picture, or how many samples a sound has."""


class Picture(msgspec.Struct, frozen=True, tag=True):
    """A picture that is decoded."""

    key: bytes
    """A hash of its size and pixels."""
    width: int
    height: int
    pixels: bytes
    """Rows from the top, of red, green and blue: a byte each."""

    @classmethod
    def of(cls, pixels: bytes, width: int, height: int) -> Picture:
        size = b"%d %d " % (width, height)
        return cls(blake2b(size + pixels, digest_size=32).digest(), width, height, pixels)

    @property
    def size(self) -> Size:
        return self.width, self.height


class Sound(msgspec.Struct, frozen=True, tag=True):
    """A sound that is decoded."""

    key: bytes
    """A hash of its samples."""
    samples: bytes
    """The samples of one channel, SAMPLE_RATE a second, from -1 to 1: floats of four bytes."""

    @classmethod
    def of(cls, samples: bytes) -> Sound:
        return cls(blake2b(samples, digest_size=32, person=b"sound").digest(), samples)

    @property
    def size(self) -> Size:
        return (len(self.samples) // 4,)


Medium = Picture | Sound
