"""Repositories with a model in OpenVINO's format: which files are taken, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")
pytest.importorskip("tokenizers", reason="corral[openvino] is not installed")

from serve_app import locks
from serve_app.config.sources import DownloadsConfig, ModelSource
from serve_app.engine import EngineOptions
from serve_app.engine.backends.openvino import OpenVinoBackend
from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.openvino.exported.files import FILES, GRAPH, WEIGHTS
from serve_app.progress import nowhere
from serve_app.store.models import (
    is_in_openvinos_format,
    locate,
    pinned,
    projector_beside,
    vocabulary,
)
from tests.integration.openvino.exported_models import unpacked
from tests.integration.store.hub_server import COMMIT, Hub

SOURCE = ModelSource(repo="owner/name")


@pytest.fixture(autouse=True)
def repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is in the repository now. Each test is as a process of its own."""
    monkeypatch.setattr(locks, "_open", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = unpacked("qwen3-fp16", tmp_path)
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.files |= {"README.md": b"# tiny", "openvino_tokenizer.xml": b"not used"}
    return folder


def test_the_source_is_pinned_to_its_graph(downloads: DownloadsConfig) -> None:
    found = pinned(SOURCE, downloads)
    assert found.repo == f"owner/name:openvino_model.xml@{COMMIT}"
    assert is_in_openvinos_format(found)
    assert projector_beside(found, downloads) is None


def test_a_vocabulary_takes_the_small_files_only(hub: Hub, downloads: DownloadsConfig) -> None:
    path = vocabulary(pinned(SOURCE, downloads), downloads)
    model = Model(path, vocab_only=True)
    assert model.n_bytes == len(hub.files[WEIGHTS])
    assert {*hub.n_bytes} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    before = hub.n_bytes.total()
    assert vocabulary(pinned(SOURCE, downloads), downloads) == path
    assert hub.n_bytes.total() == before


def test_all_of_it_is_downloaded_checked_and_served(
    hub: Hub, downloads: DownloadsConfig, repository: Path
) -> None:
    path = locate(SOURCE, downloads, nowhere)
    assert path.name == "openvino_model.xml"
    taken = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    assert taken == {name: hub.files[name] for name in FILES if name in hub.files}
    backend = OpenVinoBackend(path, EngineOptions(1, 64, 1, profile_limit_s=0, backend="openvino"))
    backend.decode([(5, 0, 0, True)])
    assert backend._context.logits(0).shape == (backend.vocabulary.n_vocab,)
    backend.close()
    # The whole model is here now, and so is its header: the same for the ingress and the engine.
    assert backend.vocabulary.path == vocabulary(SOURCE, downloads)


def test_a_damaged_file_is_refused(hub: Hub, downloads: DownloadsConfig) -> None:
    hub.lies = True
    with pytest.raises(ConfigError, match="arrived damaged"):
        locate(SOURCE, downloads, nowhere)


def test_a_repository_that_lacks_a_file_is_refused(hub: Hub, downloads: DownloadsConfig) -> None:
    del hub.files["tokenizer.json"]
    with pytest.raises(ConfigError, match=r"owner/name lacks tokenizer\.json"):
        pinned(SOURCE, downloads)


def test_a_folder_that_lacks_a_file_is_refused(
    repository: Path, downloads: DownloadsConfig
) -> None:
    (repository / WEIGHTS).unlink()
    source = ModelSource(path=repository)
    with pytest.raises(ConfigError, match=rf"the folder .* lacks {WEIGHTS}"):
        locate(source, downloads, nowhere)
    with pytest.raises(ConfigError, match=rf"the folder .* lacks {WEIGHTS}"):
        vocabulary(source, downloads)


def test_a_folder_of_links_and_the_graph_itself_are_sources(
    repository: Path, downloads: DownloadsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's cache is made of links."""
    links, blobs = tmp_path / "links", tmp_path / "blobs"
    links.mkdir()
    repository.rename(blobs)
    for path in blobs.iterdir():
        (links / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (links, links / GRAPH, Path("links"), Path("~/links")):
        source = ModelSource(path=given)
        assert is_in_openvinos_format(source)
        assert locate(source, downloads, nowhere).resolve() == blobs / GRAPH
        assert vocabulary(source, downloads).suffix == ".gguf"
    (blobs / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=rf"the folder .* lacks {WEIGHTS}"):
        locate(ModelSource(path=links), downloads, nowhere)


def test_another_folder_is_not_taken_for_openvinos(
    downloads: DownloadsConfig, tmp_path: Path
) -> None:
    source = ModelSource(path=tmp_path)
    assert not is_in_openvinos_format(source)
    with pytest.raises(ConfigError, match="Of a GGUF model, name the file"):
        locate(source, downloads, nowhere)


def test_gguf_files_come_first(hub: Hub, downloads: DownloadsConfig) -> None:
    hub.files["model-Q8_0.gguf"] = b"GGUF"
    assert pinned(SOURCE, downloads).repo == f"owner/name:model-Q8_0.gguf@{COMMIT}"
    named = ModelSource(repo="owner/name:openvino_model.xml")
    assert is_in_openvinos_format(pinned(named, downloads))
