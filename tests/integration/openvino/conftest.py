"""A folder for what OpenVINO's backend keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serve_app.kernels.openvino  # noqa: F401  # before tests import OpenVINO, which would tell Google


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where converted models are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
