"""A projector: the part of a model that sees or hears, by llama.cpp's libmtmd. It makes embeddings."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError, DecodeError, InvalidRequestError
from serve_app.base.values.media import SAMPLE_RATE, Medium, Picture, Size
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model, fingerprint_of
from serve_app.kernels.llama.vision.positions import Part, Pause, Tile, cannot_be_used
from serve_app.kernels.llama.vision.senses import ProjectorFile

_MARKER = b"<__media__>"
_LARGE = (4096, 2048)
_LAYOUTS_KEPT = 256


class Prepared:
    """llama.cpp's chunks of a picture that was resized and cut, or of a sound's spectrum. Without the
    medium's data, they cannot be encoded. Any thread; freed with the last reference. Raises
    InvalidRequestError for a medium that cannot be used."""

    def __init__(self, projector: Any, data: bytes | None, size: Size) -> None:
        self._pointer: Any = mtmd_cpp.mtmd_input_chunks_init()
        weakref.finalize(self, mtmd_cpp.mtmd_input_chunks_free, self._pointer).atexit = False
        bitmap = _bitmap(data, size)
        try:
            text = mtmd_cpp.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
            status = mtmd_cpp.mtmd_tokenize(
                projector, self._pointer, ctypes.byref(text), bitmaps, 1
            )
        finally:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
        if status != 0:
            raise InvalidRequestError(cannot_be_used(size))

    @property
    def chunks(self) -> list[Any]:
        """llama.cpp's pointers to all chunks, good as long as this is kept."""
        n_chunks = mtmd_cpp.mtmd_input_chunks_size(self._pointer)
        return [mtmd_cpp.mtmd_input_chunks_get(self._pointer, i) for i in range(n_chunks)]

    @property
    def tiles(self) -> list[Any]:
        """The chunks that are tiles, in the order of `MtmdProjector.layout`."""
        return [chunk for chunk in self.chunks if not _is_text(chunk)]


def _is_text(chunk: Any) -> bool:
    kind = mtmd_cpp.mtmd_input_chunk_get_type(chunk)
    return bool(kind == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_TEXT)


def _bitmap(data: bytes | None, size: Size) -> Any:
    if len(size) == 2:
        pixels = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        return mtmd_cpp.mtmd_bitmap_init(*size, pixels if data else None)
    samples = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_float))
    return mtmd_cpp.mtmd_bitmap_init_from_audio(*size, samples if data else None)


class MtmdProjector:
    """An open projector, of one model. `layout` and `prepare` may be called by any thread, `encode` by that
    of the model's context: OpenMP's threads belong to the thread that computes. Raises ConfigError if the
    file is missing, damaged, or for another model.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str], threads: int) -> None:
        library.init()
        self.path, self.model = Path(path), model
        if not self.path.is_file():
            raise ConfigError(f"There is no projector file at {self.path}.")
        mtmd_cpp.mtmd_helper_log_set(library.log_callback(), ctypes.c_void_p(0))
        self._pause: Pause | None = None
        self._left = False
        self._error: BaseException | None = None
        # Kept: llama.cpp holds a bare pointer.
        self._observer = llama_cpp.ggml_backend_sched_eval_callback(self._observe)
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings = False, threads, False
        params.media_marker, params.cb_eval = _MARKER, self._observer
        with library.capture_log() as lines:
            pointer = mtmd_cpp.mtmd_init_from_file(os.fsencode(self.path), model.pointer, params)
        if not pointer:
            reason = next((f": {line.strip()}" for line in lines if "mismatch" in line), "")
            raise ConfigError(
                f"llama.cpp cannot use the projector {self.path} with {model.path.name}{reason}. "
                "`projector: false` serves text only."
            )
        self.pointer: Any = pointer
        weakref.finalize(self, mtmd_cpp.mtmd_free, pointer).atexit = False
        self.sees = bool(mtmd_cpp.mtmd_support_vision(pointer))
        self.hears = bool(mtmd_cpp.mtmd_support_audio(pointer))
        if self.hears:
            ProjectorFile(self.path).check_counts()
        rate = mtmd_cpp.mtmd_get_audio_sample_rate(pointer) if self.hears else SAMPLE_RATE
        if rate != SAMPLE_RATE:
            raise ConfigError(
                f"The projector {self.path} hears {rate} samples a second. Corral has {SAMPLE_RATE}."
            )
        self.causal = not (self.sees and mtmd_cpp.mtmd_decode_use_non_causal(pointer, None))
        """Whether all tiles of pictures are."""
        self.n_embd: int = llama_cpp.llama_model_n_embd_inp(model.pointer)
        self.n_bytes = self.path.stat().st_size
        self.fingerprint = fingerprint_of([self.path])
        self._layouts: dict[Size, tuple[Part, ...]] = {}
        if self.sees:
            self.layout(_LARGE)  # has all the control tokens that there are
        if self.hears:
            self.layout((SAMPLE_RATE,))

    def layout(self, size: Size) -> tuple[Part, ...]:
        """The parts of a prompt that a picture or sound of that size becomes. llama.cpp computes a sound's
        spectrum to tell, so the last results are kept. Raises InvalidRequestError if there is no way."""
        parts = self._layouts.get(size)
        if parts is None:
            prepared = Prepared(self.pointer, None, size)
            parts = tuple(self._part(chunk) for chunk in prepared.chunks)
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            self._layouts[size] = parts
        return parts

    def _part(self, chunk: int) -> Part:
        if _is_text(chunk):
            n_tokens = ctypes.c_size_t()
            found = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_tokens))
            tokens = tuple(found[i] for i in range(n_tokens.value))
            if min(tokens) < 0:
                raise ConfigError(
                    f"{self.model.path.name} has not the control tokens that media stand between with "
                    f"the projector {self.path.name}."
                )
            return tokens
        n = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
        causal = not mtmd_cpp.mtmd_decode_use_non_causal(self.pointer, chunk)
        is_picture = (
            mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
        )
        placed = is_picture and self.model.n_dimensions > 1
        return self._tile(chunk, n, causal) if placed else Tile(n, causal=causal)

    def _tile(self, chunk: int, n_tokens: int, causal: bool) -> Tile:
        """A tile for a model with positions in several dimensions. Raises ConfigError if its positions are
        none of `Tile.positions`: HunyuanVL's depend on how many pictures came before."""
        image = mtmd_cpp.mtmd_input_chunk_get_tokens_image(chunk)
        found = (mtmd_cpp.mtmd_decoder_pos * n_tokens)()
        mtmd_cpp.mtmd_helper_image_get_decoder_pos(image, 0, found)
        places = np.ctypeslib.as_array(found).view(np.uint32).reshape(n_tokens, 4)
        time, column, row, zero = places.T
        tile = Tile(n_tokens, 0 if time[-1] else int(column[-1]) + 1, causal)
        n_positions = mtmd_cpp.mtmd_input_chunk_get_n_pos(chunk)
        known = tile.positions(0, n_tokens, 0)
        if n_positions != tile.n_positions or any(
            known != np.concatenate([time, row, column, zero])
        ):
            raise ConfigError(
                f"The projector {self.path} gives pictures positions that Corral does not know."
            )
        return tile

    def prepare(self, medium: Medium) -> Prepared:
        """A picture or sound, ready for `encode`: some hundredths of a second for a megapixel, some tenths
        for half a minute. Raises InvalidRequestError like `layout`."""
        data = medium.pixels if isinstance(medium, Picture) else medium.samples
        return Prepared(self.pointer, data, medium.size)

    def encode(
        self, prepared: Prepared, tile: int, pause: Pause | None = None
    ) -> NDArray[np.float32] | None:
        """The embeddings of one of its tiles, a row each; None if `pause` ended it. That is called
        between two nodes of the graph, and may decode. Raises DecodeError, and what `pause` raises."""
        chunk = prepared.tiles[tile]
        self._pause, self._left, self._error = pause, False, None
        status = mtmd_cpp.mtmd_encode_chunk(self.pointer, chunk)
        self._pause = None
        if self._error is not None:
            raise self._error
        if self._left:
            return None
        if status != 0:
            raise DecodeError(f"mtmd_encode_chunk returned {status}.")
        n = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
        found = mtmd_cpp.mtmd_get_output_embd(self.pointer)
        return np.ctypeslib.as_array(found, shape=(n, self.n_embd)).copy()

    def _observe(self, _tensor: int, asks: bool, _data: int) -> bool:
        """llama.cpp asks whether to stop behind a node, and then whether to go on."""
        if self._pause is None or asks:
            return self._pause is not None
        try:
            self._left = not self._pause()
        except BaseException as error:  # which cannot go through llama.cpp
            self._left, self._error = True, error
        return not self._left
