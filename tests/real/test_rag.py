"""Questions about this project's documents for users, by docs/examples/rag.py and two real models."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import Corral, short_folder, stopped_at_the_end
from tests.real.models import ROOT, minilm, smollm2

pytestmark = pytest.mark.timeout(600)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the program, beside a server that is started as `corral serve CHAT EMBED`."""
    models = [
        {"id": name, "source": {"path": str(path)}}
        for name, path in (("smollm2", smollm2()), ("minilm", minilm()))
    ]
    folder = tmp_path_factory.mktemp("rag")

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, ROOT / "docs/examples/rag.py", *arguments],
            env=os.environ | {"CORRAL_URL": server.url},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        ).stdout

    with (
        short_folder() as directory,
        stopped_at_the_end(Corral(directory, models, local=True)) as server,
    ):
        others = shutil.ignore_patterns("develop", "benchmarks", "changelog.md")
        shutil.copytree(ROOT / "docs", folder / "docs", ignore=others)
        n_files = len([*(folder / "docs").rglob("*.md")])
        told = run("index", "docs")
        assert told.startswith(f"{n_files} of {n_files} files have changed: ")
        assert run("index", "docs").startswith(f"0 of {n_files} files have changed: 0 chunks")
        yield run


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("How much memory does the KV cache take?", "models.md"),
        ("How can I serve a model on Kubernetes?", "deploy/kubernetes.md"),
        ("How do I upgrade from one version to the next?", "operate/faq.md"),
    ],
)
def test_the_page_with_the_answer_is_among_the_sources(run: Run, question: str, page: str) -> None:
    """What a model of 135 million parameters makes of it is another question."""
    told = run("ask", question)
    sources = re.findall(r"^\[\d\] (.+?): ", told, re.M)
    assert len(sources) == 4
    assert page in sources
    assert told.partition("\n\n[1] ")[0].strip()
