"""The senses that a projector is for, and whether llama.cpp can use it, by its file's metadata."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
from gguf import GGUFReader, GGUFWriter

from serve_app.base.errors import ConfigError
from serve_app.kernels.llama import library


class Senses(NamedTuple):
    """The kinds of media that a model takes."""

    sees: bool = False
    hears: bool = False


NO_SENSES = Senses()


# Steps of a half minute in encoders of Whisper's kind, and projectors that stack several of them.
_N_STEPS = 1500
_STACKING = ("ultravox", "meralion")


def senses(path: Path) -> Senses:
    """The senses of a projector's file, whose weights may be missing. Raises ConfigError if it is none."""
    reader = _reader(path)
    return Senses(*(bool(_value(reader, f"clip.has_{one}_encoder")) for one in ("vision", "audio")))


def check_counts(path: Path) -> None:
    """Refuse, with ConfigError, a projector of which llama.cpp counts a sound's embeddings wrongly: it
    would end the whole process at the first one (`clip_n_output_tokens` in tools/mtmd/clip.cpp)."""
    reader = _reader(path)
    kind = _value(reader, "clip.audio.projector_type") or _value(reader, "clip.projector_type")
    n_stacked = _value(reader, "clip.audio.projector.stack_factor")
    if kind in _STACKING and n_stacked and _N_STEPS % n_stacked:
        raise ConfigError(
            f"The projector {path} stacks {n_stacked} steps of a sound, of which llama.cpp counts the last "
            "ones wrongly. It would end the engine at the first sound."
        )


def _reader(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"The projector {path} cannot be read: {error}") from error


def _value(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


_UNKNOWN = b"unknown projector type"


def why_unusable(path: Path, n_embd: int) -> str | None:
    """Why llama.cpp cannot use that projector with a model of so wide embeddings; None if nothing is known
    against it. The file's weights may be missing. Any thread."""
    try:
        reader, able = _reader(path), senses(path)
        if able == NO_SENSES:
            return f"{path.name} is for neither pictures nor sounds."
        named = _value(reader, "clip.projector_type")
        for has, sense in ((able.sees, "vision"), (able.hears, "audio")):
            kind = str(named or _value(reader, f"clip.{sense}.projector_type"))
            if has and not _is_known(kind):
                return f"{path.name} is of the kind {kind}, which this version of llama.cpp does not know."
        check_counts(path)
    except ConfigError as error:
        return str(error)
    # The last of its matrices makes embeddings, so one of its sides is their width.
    if all(n_embd not in tensor.shape for tensor in reader.tensors):
        return f"{path.name} is for another model: it makes no embeddings of {n_embd} numbers."
    return None


def _is_known(kind: str) -> bool:
    """llama.cpp looks at the kind first. Its complaints are not logged: the file is made here."""
    from llama_cpp import mtmd_cpp  # whose library takes memory

    said: list[bytes] = []
    keep = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text))
    library.init()
    mtmd_cpp.mtmd_log_set(keep, ctypes.c_void_p(0))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kind.gguf")
            writer = GGUFWriter(path, "clip")
            writer.add_bool("clip.has_vision_encoder", True)
            writer.add_string("clip.projector_type", kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            params = mtmd_cpp.mtmd_context_params_default()
            params.use_gpu = False
            if pointer := mtmd_cpp.mtmd_init_from_file(os.fsencode(path), None, params):
                mtmd_cpp.mtmd_free(pointer)
    finally:
        mtmd_cpp.mtmd_log_set(library.log_callback(), ctypes.c_void_p(0))
    return _UNKNOWN not in b"".join(said)
