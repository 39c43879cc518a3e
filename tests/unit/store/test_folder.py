"""The bound of the folder that models lie in, while several are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from serve_app.base.errors import ConfigError
from serve_app.store.folder import ModelsFolder
from serve_app.store.remote import Origin, RemoteFile, RemoteModel

KIB = 2**10
NOWHERE = cast(Origin, None)


def model(name: str, *sizes: int) -> RemoteModel:
    files = tuple(RemoteFile(f"{name}-{n}.gguf", size) for n, size in enumerate(sizes))
    return RemoteModel(name, files, NOWHERE)


def arrive(folder: ModelsFolder, model: RemoteModel, n_files: int) -> None:
    """Have the first files of a model there, as if they had been downloaded."""
    for file in model.files[:n_files]:
        folder.file(model, file).write_bytes(b"1" * file.n_bytes)


def test_what_others_are_still_to_get_counts_from_the_start(tmp_path: Path) -> None:
    folder = ModelsFolder(tmp_path, 100 * KIB)
    first, second = model("first", 40 * KIB, 20 * KIB), model("second", 50 * KIB)
    with folder.alone(first) as lock:
        assert lock is not None
        folder.make_room(first)
        with pytest.raises(ConfigError, match=r"second takes .* more than there is room for"):
            folder.make_room(second)
        arrive(folder, first, 1)
        assert folder.n_present(first) == 40 * KIB
        assert folder.has(first, first.files[0])
        assert not folder.has(first, first.files[1])
        with pytest.raises(ConfigError, match="beside the models that are in use"):
            folder.make_room(second)
        arrive(folder, first, 2)
        folder.finish(first)
    assert folder.is_whole(first)
    assert folder.open(first)
    with pytest.raises(ConfigError, match="beside the models that are in use"):
        folder.make_room(second)
    folder.make_room(model("small", 40 * KIB))


def test_what_came_of_a_download_that_ended_goes_first(tmp_path: Path) -> None:
    folder = ModelsFolder(tmp_path, 100 * KIB)
    whole, part = model("whole", 40 * KIB), model("part", 30 * KIB, 20 * KIB)
    for one in (whole, part):
        folder.make_room(one)
        arrive(folder, one, 1)
    folder.finish(whole)
    assert folder.open(whole)  # it was used, as downloads are
    folder.locks.leave(whole.folder)
    folder.make_room(model("new", 50 * KIB))
    assert folder.is_whole(whole)
    assert folder.n_present(part) == 0
    assert [*tmp_path.glob("part*")] == []


def test_a_model_is_deleted_with_what_came_of_it(tmp_path: Path) -> None:
    folder, part = ModelsFolder(tmp_path), model("part", 30 * KIB, 20 * KIB)
    folder.make_room(part)
    arrive(folder, part, 1)
    folder.delete(part)
    assert [*tmp_path.glob("part*")] == []
