"""The builder of llama-server, but for the building."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from loadtests.compare import llama_server

ROOT = Path(__file__).parents[4]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("amx", [True, False])
def test_flags_are_those_of_corrals_own_llama_cpp(amx: bool) -> None:
    made = (ROOT / "Makefile").read_text()
    with_amx, without = re.findall(r"^export CMAKE_ARGS := (.*)$", made, re.M)
    ours = shlex.split((with_amx if amx else without).replace("$(CURDIR)", str(ROOT)))
    assert tuple(ours) == llama_server.compiler_flags(amx)


def test_what_is_there_is_not_built_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*command: object, **_: object) -> None:
        pytest.fail(f"ran {command}")

    monkeypatch.setattr(subprocess, "run", refuse)
    folder = llama_server.folder()
    assert folder.is_relative_to(home)
    folder.mkdir(parents=True)
    for file in llama_server.FILES:
        assert not llama_server.is_built()
        (folder / file).touch()
    assert llama_server.build(1) == folder


def test_a_failed_build_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: tuple[object, ...], **_: object) -> None:
        raise subprocess.CalledProcessError(1, str(command))

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        llama_server.build(1)
    assert list(llama_server.folder().parent.iterdir()) == []
    assert not llama_server.is_built()
