"""A folder for what engines keep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models that are converted for OpenVINO are kept for the other tests, and not for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
