"""Questions to a folder, by docs/examples/rag.py and one server with three models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import PoolingType

from tests.e2e.conftest import ROOT, Corral, model, short_folder, stopped_at_the_end
from tools.random_models.encoder import SHAPES, write_encoder

TIMEOUT_S = 120
FILES = {
    "fox.md": "# Animals\n\nthe fox\n",
    "cats/cat.md": "# Animals\n\n## Cats\n\na cat story\n\nthe story\n",
    "left-out.py": "the cat",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corral]:
    """As `corral serve CHAT EMBED RERANK`, in another order."""
    folder = tmp_path_factory.mktemp("models")
    models = [
        model(write_encoder(folder / f"{name}.gguf", SHAPES["tiny"], pooling), name)
        for name, pooling in (("ranker", PoolingType.RANK), ("encoder", PoolingType.MEAN))
    ]
    models.append(model(None, "demo", n_slots=2, n_ctx_slot=2048))
    with (
        short_folder() as directory,
        stopped_at_the_end(Corral(directory, models, local=True)) as started,
    ):
        yield started


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def rag(server: Corral, documents: Path, *arguments: str, status: int = 0) -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs/examples/rag.py", *arguments],
        env=os.environ | {"CORRAL_URL": server.url},
        cwd=documents.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_only_what_has_changed_is_indexed(server: Corral, documents: Path) -> None:
    def indexed(*arguments: str) -> tuple[str, str]:
        told = rag(server, documents, *arguments, "index", "documents")
        found = re.fullmatch(r"(.+): (\d+ chunks) in [\d.]+ s; (\d+) in all\.\n", told)
        assert found, told
        return f"{found[1]}: {found[2]}", found[3]

    assert indexed() == ("2 of 2 files have changed: 2 chunks", "2")
    assert indexed() == ("0 of 2 files have changed: 0 chunks", "2")
    (documents / "fox.md").write_text("the fox\n\n## More\n\na fox\n")
    assert indexed() == ("1 of 2 files have changed: 2 chunks", "3")
    (documents / "fox.md").unlink()
    assert indexed() == ("0 of 1 files have changed: 0 chunks", "1")
    assert indexed("--embed", "demo") == ("1 of 1 files have changed: 1 chunks", "1")
    assert "[1] cats/cat.md: Cats\n" in rag(server, documents, "ask", "a cat story")


@pytest.mark.parametrize("question", ["Animals the fox", "Cats a cat story the story"])
def test_an_answer_has_its_sources(server: Corral, documents: Path, question: str) -> None:
    """The model that ranks has random weights: it knows no order, but has each source once."""
    rag(server, documents, "index", "documents")
    told = rag(server, documents, "ask", question)
    answer, _, rest = told.partition("\n\n")
    *sources, times = rest.splitlines()
    assert answer
    assert sorted(source[4:] for source in sources) == ["cats/cat.md: Cats", "fox.md: Animals"]
    assert re.fullmatch(r"Found in [\d.]+ s, first token after [\d.]+ s, all in [\d.]+ s\.", times)
    expected = server.http.post(
        "/v1/rerank",
        json={
            "model": "ranker",
            "query": question,
            "documents": ["Animals\nthe fox", "Cats\na cat story\nthe story"],
        },
    ).json()["results"]
    assert sources[0][4:8] == ["fox.", "cats"][expected[0]["index"]]


def test_an_empty_index_is_said(server: Corral, documents: Path) -> None:
    told = rag(server, documents, "ask", "the fox", status=1)
    assert "The index is empty: python rag.py index FOLDER fills it." in told
