"""llama.cpp's own helper, which computes a prompt with pictures as llama-server does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp
from numpy.typing import NDArray

from serve_app.base.values.media import Medium, Sound
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.vision.projector import MtmdProjector

MARKER = "<__media__>"


class Reference:
    """One sequence, computed by `mtmd_helper_eval_chunks`."""

    def __init__(
        self, model: Path, projector: Path, n_ctx: int, n_batch: int, *, embeds: bool = False
    ) -> None:
        self._model = Model(model)
        self._projector = MtmdProjector(self._model, projector, 1)
        self._context = Context(
            self._model,
            ContextOptions(
                n_seq_max=1,
                n_ctx_slot=n_ctx,
                n_batch=n_batch,
                n_outputs=n_batch,
                threads=1,
                flash_attn=False,
                pooling="none" if embeds else None,
            ),
        )
        self._n_batch = n_batch
        self._n_past = llama_cpp.llama_pos(0)

    def prompt(self, text: str, media: Sequence[Medium]) -> None:
        """Compute a text, with MARKER in the places of media."""
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        bitmaps = [_bitmap(one) for one in media]
        said = mtmd_cpp.mtmd_input_text(text.encode(), len(text.encode()), False, True)
        places = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        pointer = self._projector.pointer
        assert (
            mtmd_cpp.mtmd_tokenize(pointer, chunks, ctypes.byref(said), places, len(bitmaps)) == 0
        )
        past = ctypes.byref(self._n_past)
        assert (
            mtmd_cpp.mtmd_helper_eval_chunks(
                pointer, self._context.pointer, chunks, 0, 0, self._n_batch, True, past
            )
            == 0
        )
        for bitmap in bitmaps:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
        mtmd_cpp.mtmd_input_chunks_free(chunks)

    def feed(self, *tokens: int) -> None:
        """Compute these behind it, in one batch."""
        first, last = self._n_past.value, len(tokens) - 1
        self._context.decode([(token, first + i, 0, i == last) for i, token in enumerate(tokens)])
        self._n_past.value += len(tokens)

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """Of every token, to be next."""
        found = llama_cpp.llama_get_logits_ith(self._context.pointer, -1)
        logits = np.ctypeslib.as_array(found, shape=(self._model.n_vocab,)).astype(np.float64)
        likely: NDArray[np.float64] = logits - logits.max()
        likely -= np.log(np.exp(likely).sum())
        return likely

    @property
    def vector(self) -> NDArray[np.float32]:
        """The vector of the last token, in a context that embeds."""
        found = llama_cpp.llama_get_embeddings_ith(self._context.pointer, -1)
        return np.ctypeslib.as_array(found, shape=(self._model.n_embd,)).copy()

    def close(self) -> None:
        """Free the context."""
        self._context.close()


@contextmanager
def reference(
    model: Path, projector: Path, n_ctx: int, n_batch: int, *, embeds: bool = False
) -> Iterator[Reference]:
    """One of a model and a projector."""
    one = Reference(model, projector, n_ctx, n_batch, embeds=embeds)
    try:
        yield one
    finally:
        one.close()


def _bitmap(medium: Medium) -> Any:
    if isinstance(medium, Sound):
        samples = ctypes.cast(ctypes.c_char_p(medium.samples), ctypes.POINTER(ctypes.c_float))
        return mtmd_cpp.mtmd_bitmap_init_from_audio(*medium.size, samples)
    picture = medium
    pixels = ctypes.cast(ctypes.c_char_p(picture.pixels), ctypes.POINTER(ctypes.c_uint8))
    return mtmd_cpp.mtmd_bitmap_init(picture.width, picture.height, pixels)
