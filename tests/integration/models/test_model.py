"""What a model tells about its file."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from gguf import GGUFReader
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.base.errors import ConfigError
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model
from serve_app.store.builtin_model import BUILTIN_MODEL, BUILTIN_PROJECTOR
from tests.integration.models.embedding_models import write_t5
from tools.random_models.model import SHAPES, write_random_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


def fingerprint(path: Path) -> bytes:
    return Model(path, vocab_only=True).fingerprint()


def test_a_fingerprint_is_of_the_content(path: Path) -> None:
    copied = path.with_name("copy.gguf")
    shutil.copyfile(path, copied)
    assert fingerprint(copied) == Model(path).fingerprint()
    assert len(fingerprint(path)) == 32


def test_models_of_one_shape_have_different_fingerprints(path: Path) -> None:
    other = path.with_name("other.gguf")
    write_random_gguf(other, SHAPES["tiny"], "q8_0", seed=1)
    assert other.stat().st_size == path.stat().st_size
    assert fingerprint(other) != fingerprint(path)


@pytest.mark.parametrize("at", [-1, 0.5])
def test_a_changed_byte_that_is_read_is_noticed(path: Path, at: float) -> None:
    before, size = fingerprint(path), path.stat().st_size
    with path.open("r+b") as file:
        place = file.seek(size - 1 if at < 0 else int(size * at))
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    assert fingerprint(path) != before


def test_a_longer_file_has_another_fingerprint(path: Path) -> None:
    before = fingerprint(path)
    with path.open("ab") as file:
        file.write(bytes(1))
    assert fingerprint(path) != before


def vocabulary_key(path: Path, vocab_only: bool = False) -> bytes:
    return Model(path, vocab_only=vocab_only).vocabulary_key


def test_a_vocabulary_is_known_whatever_the_weights(path: Path) -> None:
    other = path.with_name("other.gguf")
    write_random_gguf(other, SHAPES["tiny"], "f16", seed=1)
    assert (
        len({vocabulary_key(path), vocabulary_key(other), vocabulary_key(path, vocab_only=True)})
        == 1
    )


def test_vocabularies_of_one_size_are_told_apart(path: Path) -> None:
    keys = {vocabulary_key(path)}
    for control in ("<|one|>", "<|other|>"):
        other = path.with_name("other.gguf")
        write_random_gguf(other, SHAPES["tiny"], "q8_0", more_control=[control])
        assert Model(other).n_vocab == Model(path).n_vocab
        keys.add(vocabulary_key(other))
    assert len(keys) == 3


def test_the_kind_of_a_token_counts(path: Path) -> None:
    """And which one ends a text."""
    keys = {vocabulary_key(path)}
    for change in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.token_type"):
        other = path.with_name("other.gguf")
        shutil.copyfile(path, other)
        field = GGUFReader(other, "r+").fields[change]
        field.parts[field.data[0]][0] ^= 2
        keys.add(vocabulary_key(other))
    assert len(keys) == 3


def test_kernels_are_loaded_once() -> None:
    """Whether llama.cpp was built for this machine or for all (`cluster/Dockerfile`)."""
    library.init()
    loaded = ctypes.CDLL(str(Path(llama_cpp.__file__).with_name("lib") / "libllama.so"))
    assert loaded.ggml_backend_dev_count() == 1
    library._load_kernels()
    assert loaded.ggml_backend_reg_count() == 1


@pytest.mark.parametrize("architecture", ["t5", "t5encoder"])
def test_models_with_an_encoder_are_refused(tmp_path: Path, architecture: str) -> None:
    """llama.cpp takes them, and Corral would ask their decoder about a prompt that no encoder has read."""
    path = tmp_path / "t5.gguf"
    write_t5(path, architecture)
    message = rf"t5\.gguf is of the architecture {architecture}, with an encoder"
    with pytest.raises(ConfigError, match=message):
        Model(path, vocab_only=True)


@pytest.mark.parametrize("engine", [{}, {"n_slots": 1, "n_ctx_slot": 64}], ids=["open", "sized"])
def test_they_stop_the_start(tmp_path: Path, engine: dict[str, int]) -> None:
    path = tmp_path / "t5.gguf"
    write_t5(path, "t5")
    entry = {"id": "m", "source": {"path": str(path)}, "engine": engine}
    with pytest.raises(
        RayServeException, match=r"models \(m\): .* architecture t5, with an encoder"
    ):
        build({"models": [entry]})


WHOLE = BUILTIN_MODEL.read_bytes()
TRUNCATED = "data is not within the file bounds, model is corrupted or incomplete"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (WHOLE[: len(WHOLE) // 2], TRUNCATED),
        (WHOLE[:3000], "failed to read key-value pairs"),
        (b"junk" * 1000, "invalid magic characters: 'junk', expected 'GGUF'"),
        (b"", "failed to read magic"),
        (WHOLE.replace(b"\0gpt2", b"\0gptX", 1), "unknown tokenizer: 'gptX'"),
        (BUILTIN_PROJECTOR.read_bytes(), "it is a projector. Name it in `projector`"),
    ],
    ids=["truncated", "truncated header", "no GGUF", "empty", "tokenizer", "projector"],
)
def test_a_file_that_cannot_be_loaded_stops_the_start_in_llama_cpps_words(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(RayServeException, match=re.escape(reason)):
        build({"models": [{"id": "m", "source": {"path": str(path)}}]})


def test_a_file_that_may_not_be_read_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    path.chmod(0)
    user = os.geteuid()
    try:
        if not user:
            os.seteuid(65534)  # root may read all
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            Model(path, vocab_only=True)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("engine", [{}, {"n_slots": 1, "n_ctx_slot": 64}], ids=["open", "sized"])
def test_a_broken_chat_template_stops_the_start(engine: dict[str, int]) -> None:
    entry = {"id": "m", "source": {"builtin": True}, "engine": engine}
    entry |= {"defaults": {"chat_template": "{% if %}"}}
    with pytest.raises(RayServeException, match=r"models \(m\): .*chat template is not valid"):
        build({"models": [entry]})


def test_a_recommendation_that_is_no_number_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meta(model: Model, key: str) -> str | None:
        return "hot" if key == "general.sampling.temp" else read(model, key)

    read = Model.meta
    monkeypatch.setattr(Model, "meta", meta)
    with pytest.raises(RayServeException, match="sampling parameters that the file recommends"):
        build({"models": [{"id": "m", "source": {"builtin": True}}]})


def test_how_the_numbers_are_stored() -> None:
    assert Model(BUILTIN_MODEL, vocab_only=True).file_type == "Q8_0"


def test_llama_cpp_is_loaded_once_from_wherever_it_is(tmp_path: Path) -> None:
    """A second copy would have variables of its own."""
    copied = shutil.copytree(library._PATH.parent, tmp_path / "lib")
    code = "from serve_app.kernels.llama import library; library.init(); "
    code += "print(open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(copied)},
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = {line.split()[-1] for line in done.stdout.splitlines() if "libllama" in line}
    assert [Path(one).parent for one in loaded] == [copied]
