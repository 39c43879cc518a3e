"""Fixtures of the ingress' tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.config.schema import BatchConfig, IngressConfig
from serve_app.server.model_registry import ServedModel
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
async def client(
    engine: ScriptedEngine, tokenizer: ByteTokenizer, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    from tests.doubles.api import build_api  # takes long, and many tests do without

    models = {
        name: ServedModel(name, N_CTX_SLOT, tokenizer, engine=engine)  # type: ignore[arg-type]
        for name in ("first", "org/second")
    }
    api = build_api(models, IngressConfig(batch=BatchConfig(folder=tmp_path / "batches")))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of two MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
