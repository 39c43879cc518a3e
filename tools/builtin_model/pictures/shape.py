"""The sizes of the built-in model's eyes."""

from __future__ import annotations

from dataclasses import dataclass

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class EyesShape:
    """Sizes of a vision encoder, and of what is behind it. Rows of matrices are multiples of 32."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    image_size: int
    """Pixels of a side."""
    patch_size: int
    n_hidden: int
    """Numbers between the encoder and the language model's embeddings."""
    n_out: int
    """Numbers in an embedding of the language model."""
    n_merge: int = 2
    """Patches of a side that become one embedding."""

    @property
    def n_side(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def n_tokens(self) -> int:
        """Embeddings of a picture."""
        return (self.n_side // self.n_merge) ** 2


SHAPE = EyesShape(4, 128, 384, 4, 96, 12, 384, 256)
"""The trained one: a picture is 16 embeddings."""
