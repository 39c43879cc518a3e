"""Prefixes kept as files: the disk tier's, and those that clients have slots saved to."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.base.errors import (
    ConfigError,
    EngineClosedError,
    EngineUnavailableError,
    NotSupportedError,
    StorageFullError,
)
from serve_app.engine import Engine, InvalidRequestError
from serve_app.engine.cache import files, packing
from serve_app.engine.cache.contents import Checkpoint, StoredPrefix
from serve_app.engine.cache.files import _DIGEST_BYTES, _FIELDS, DiskTier, size_of
from serve_app.engine.core.command_queue import Command
from tests.unit.engine.harness import (
    SteppedBackend,
    WatchedBackend,
    ask,
    options,
    request,
    running,
    start,
)

HEADER = _FIELDS.size + _DIGEST_BYTES


def prefix(text: str, n_bytes: int = 100, group: str = "") -> StoredPrefix:
    return StoredPrefix(packing.token_array(list(text.encode())), text[0].encode() * n_bytes, group)


@contextmanager
def opened(folder: Path, fingerprint: bytes = b"model") -> Iterator[DiskTier]:
    files = DiskTier(folder, fingerprint)
    try:
        yield files
    finally:
        files.close()


def keep(folder: Path, *texts: str, fingerprint: bytes = b"model") -> list[Path]:
    """Have each text on disk, the last one used last; returns the files."""
    made: list[Path] = []
    for age, text in enumerate(reversed(texts)):
        before = on_disk(folder)
        with opened(folder, fingerprint) as files:
            files.add(prefix(text))
        (path,) = on_disk(folder) - before
        os.utime(path, ns=(0, 10**18 - age))
        made.insert(0, path)
    return made


def on_disk(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def loaded(folder: Path, budget: int = 10_000, fingerprint: bytes = b"model") -> list[str]:
    """The texts that a new start finds, the least recently used first."""
    with opened(folder, fingerprint) as files:
        found = files.load(budget)
    assert all(each.state == prefix(chr(each.tokens[0])).state for each in found)
    return [bytes(list(each.tokens)).decode() for each in found]


class Disk:
    """Holds up the writer's first file until `release`."""

    def __init__(self) -> None:
        self.busy, self.released = threading.Event(), threading.Event()

    def fsync(self, _descriptor: int) -> None:
        self.busy.set()
        assert self.released.wait(10)

    def occupy(self, files: DiskTier) -> None:
        files.add(prefix("occupied"))
        assert self.busy.wait(10)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr("serve_app.engine.cache.files.os.fsync", made.fsync)
    return made


# -- what a restart finds -------------------------------------------------------------------------


def test_a_restart_finds_what_was_added_and_not_what_was_discarded(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        assert files.load(10_000) == []
        a, b = prefix("a chat"), prefix("b chat")
        files.add(a)
        files.add(b)
        files.discard(a)
        files.discard(prefix("never added"))
    assert loaded(tmp_path) == ["b chat"]


def test_an_empty_state_and_tokens_of_all_sizes(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        files.add(StoredPrefix(packing.token_array([0, 2**31 - 1, -1]), b"", ""))
    with opened(tmp_path) as files:
        (found,) = files.load(0)
    assert (list(found.tokens), found.state) == ([0, 2**31 - 1, -1], b"")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(300, ["a", "b", "c"]), (299, ["b", "c"]), (100, ["c"]), (99, []), (0, [])],
)
def test_the_newest_that_fit_are_loaded_and_others_removed(
    tmp_path: Path, budget: int, expected: list[str]
) -> None:
    made = keep(tmp_path, "a", "b", "c")
    assert loaded(tmp_path, budget) == expected
    assert on_disk(tmp_path) == set(made[len(made) - len(expected) :])


def test_what_is_added_again_is_the_newest_and_not_written_again(tmp_path: Path) -> None:
    first, _ = keep(tmp_path, "a", "b")
    inode = first.stat().st_ino
    with opened(tmp_path) as files:
        files.add(files.load(10_000)[0])
    assert loaded(tmp_path) == ["b", "a"]
    assert first.stat().st_ino == inode


def test_models_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, "a", fingerprint=b"model")
    keep(tmp_path, "a", "b", fingerprint=b"other")
    assert loaded(tmp_path, fingerprint=b"model") == ["a"]
    assert loaded(tmp_path, fingerprint=b"other") == ["a", "b"]
    assert caplog.messages == []


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        (path,) = keep(tmp_path / "parent" / "cache", "secret")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    (path,) = keep(tmp_path, "secret")
    path.parent.chmod(0o755)
    assert loaded(tmp_path) == ["secret"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Prefixes cannot be kept in .*file"):
        DiskTier(tmp_path / "file", b"model")


def with_checkpoints(*marks: tuple[int, bytes]) -> StoredPrefix:
    made = prefix("a chat")
    checkpoints = tuple(Checkpoint(*mark) for mark in marks)
    return StoredPrefix(made.tokens, made.state, made.group, checkpoints)


def test_checkpoints_are_kept_and_count(tmp_path: Path) -> None:
    made = with_checkpoints((2, b"two"), (5, b"fives"))
    with opened(tmp_path) as files:
        files.add(made)
    (path,) = on_disk(tmp_path)
    assert path.stat().st_size == size_of(made)
    for budget, n_found in ((108, 1), (107, 0)):
        with opened(tmp_path) as files:
            found = files.load(budget)
        assert len(found) == n_found
        for one in found:
            assert [(mark.n_tokens, mark.state) for mark in one.checkpoints] == [
                (2, b"two"),
                (5, b"fives"),
            ]


@pytest.mark.parametrize(
    "marks", [((0, b"x"),), ((3, b"x"), (3, b"y")), ((4, b"x"), (2, b"y")), ((7, b"x"),)]
)
def test_checkpoints_of_other_lengths_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, marks: tuple[tuple[int, bytes], ...]
) -> None:
    with opened(tmp_path) as files:
        files.add(with_checkpoints(*marks))
    assert loaded(tmp_path) == []
    assert "checkpoints are not of its tokens" in caplog.text


# -- damaged and foreign files --------------------------------------------------------------------


def flip(at: int) -> Callable[[bytes], bytes]:
    """Damage the byte there."""
    return lambda data: data[:at] + bytes([data[at] ^ 0x55]) + data[at:][1:]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: b"", "not a stored prefix"),
        (lambda data: b"something else" * 100, "not a stored prefix"),
        (lambda data: data[: HEADER - 1], "not a stored prefix"),
        (lambda data: data[:-1], "bytes, its header says"),
        (lambda data: data + b"!", "bytes, its header says"),
        (flip(0), "not a stored prefix"),
        (flip(8), "of version"),
        (flip(12), "of another model"),
        (flip(44), "bytes, its header says"),
        (flip(47), "bytes, its header says"),  # four billion tokens
        (flip(55), "bytes, its header says"),  # exabytes of state
        (flip(59), "bytes, its header says"),  # gigabytes of cache group
        (flip(63), "bytes, its header says"),  # millions of checkpoints
        (flip(71), "bytes, its header says"),  # exabytes of their states
        (flip(_FIELDS.size), "checksum"),
        (flip(HEADER), "checksum"),
        (flip(-2), "checksum"),
        # A token less and four bytes of state more: the size fits.
        (lambda data: data[:44] + b"\5\0\0\0\x68" + data[49:], "checksum"),
    ],
)
def test_a_damaged_file_is_refused_with_one_line_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], why: str
) -> None:
    path, _ = keep(tmp_path, "a chat", "b chat")
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert loaded(tmp_path) == ["b chat"]
    (message,) = caplog.messages
    assert str(path) in message
    assert why in message
    assert path.read_bytes() == damaged


def test_another_models_file_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (theirs,) = keep(tmp_path, "a", fingerprint=b"other")
    (ours,) = keep(tmp_path, "b")
    theirs.replace(ours.parent / theirs.name)
    assert loaded(tmp_path) == ["b"]
    assert "of another model" in caplog.text


def test_what_is_not_under_its_own_name_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = keep(tmp_path, "a")
    (path.parent / "backup.prefix").write_bytes(path.read_bytes())
    (path.parent / "folder").mkdir()
    os.mkfifo(path.parent / "pipe")  # would block whoever opens it
    assert loaded(tmp_path) == ["a"]
    assert len(caplog.messages) == 3
    assert caplog.text.count("not under its own name") == 1
    assert caplog.text.count("not a file") == 2


def test_a_damaged_file_is_replaced_when_its_prefix_is_added(tmp_path: Path) -> None:
    (path,) = keep(tmp_path, "a")
    path.write_bytes(b"damaged")
    with opened(tmp_path) as files:
        assert files.load(10_000) == []
        files.add(prefix("a"))
    assert loaded(tmp_path) == ["a"]


def test_only_unfinished_files_that_nobody_writes_any_more_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = keep(tmp_path, "a")
    abandoned, fresh = (path.parent / f"{name}.unfinished" for name in ("abandoned", "fresh"))
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    fresh.touch()
    assert loaded(tmp_path) == ["a"]
    assert on_disk(tmp_path) == {path, fresh}
    assert caplog.messages == []


# -- cache groups ---------------------------------------------------------------------------------


def test_each_cache_group_has_its_own_file_and_a_restart_keeps_them_apart(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for group in ("", "mine", "theirs", "mine"):
            files.add(prefix("a chat", group=group))
    assert len(on_disk(tmp_path)) == 3
    with opened(tmp_path) as files:
        found = files.load(10_000)
        files.discard(prefix("a chat", group="theirs"))
    assert sorted(one.group for one in found) == ["", "mine", "theirs"]
    assert {bytes(list(one.tokens)) for one in found} == {b"a chat"}
    with opened(tmp_path) as files:
        assert sorted(one.group for one in files.load(10_000)) == ["", "mine"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_of_another_cache_group_is_not_taken_for_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, renamed: bool
) -> None:
    """Neither under the name that it would have, nor with the group in it replaced."""
    with opened(tmp_path) as files:
        files.add(prefix("a", group="mine"))
    (mine,) = on_disk(tmp_path)
    with opened(tmp_path) as files:
        files.add(prefix("a", group="evil"))
    (evil,) = on_disk(tmp_path) - {mine}
    data = evil.read_bytes()
    assert data[HEADER:].startswith(b"evil")
    mine.write_bytes(data if renamed else data[:HEADER] + b"mine" + data[HEADER + 4 :])
    evil.unlink()
    with opened(tmp_path) as files:
        assert files.load(10_000) == []
    assert ("not under its own name" if renamed else "checksum") in caplog.text


def test_tokens_cannot_pass_for_a_cache_group(tmp_path: Path) -> None:
    """What is hashed to a name tells where the group ends."""
    packed = packing.pack([7]).decode()
    with opened(tmp_path) as files:
        files.add(StoredPrefix(packing.token_array([7, 8]), b"", ""))
        files.add(StoredPrefix(packing.token_array([8]), b"", packed))
    assert len(on_disk(tmp_path)) == 2


# -- several replicas -----------------------------------------------------------------------------


def test_what_another_replica_discarded_is_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        one.add(prefix("a"))
    with opened(tmp_path) as one, opened(tmp_path) as other:
        (found,) = one.load(10_000)
        other.discard(found)
        other.close()
        assert on_disk(tmp_path) == set()
        one.add(found)
    assert loaded(tmp_path) == ["a"]


def test_a_file_that_goes_while_others_are_read_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = keep(tmp_path, "a", "b")
    original = DiskTier._newest_first

    def lists_and_loses(files: DiskTier) -> list[Path]:
        found = original(files)
        first.unlink()
        return found

    monkeypatch.setattr(DiskTier, "_newest_first", lists_and_loses)
    assert loaded(tmp_path) == ["b"]
    assert caplog.messages == []


# -- a slow disk ----------------------------------------------------------------------------------


def test_close_waits_for_what_is_queued(tmp_path: Path, disk: Disk) -> None:
    with opened(tmp_path) as files:
        disk.occupy(files)
        files.add(prefix("a"))
        files.add(prefix("b"))
        assert not [path for path in on_disk(tmp_path) if path.suffix == ".prefix"]
        disk.released.set()
    assert sorted(loaded(tmp_path)) == ["a", "b", "occupied"]


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [("+", True), ("+-", False), ("+-+", True), ("+-+-", False), ("-+", True), ("++", True)],
)
@pytest.mark.parametrize("was_there", [False, True])
def test_the_last_wish_counts(
    tmp_path: Path, disk: Disk, wishes: str, expected: bool, was_there: bool
) -> None:
    disk.released.set()
    if was_there:
        keep(tmp_path, "a")
    disk.busy.clear()
    disk.released.clear()
    with opened(tmp_path) as files:
        files.load(10_000)
        disk.occupy(files)
        for wish in wishes:
            (files.add if wish == "+" else files.discard)(prefix("a"))
        disk.released.set()
    assert ("a" in loaded(tmp_path)) is expected


def test_what_is_being_written_can_be_discarded(tmp_path: Path, disk: Disk) -> None:
    with opened(tmp_path) as files:
        disk.occupy(files)
        files.discard(prefix("occupied"))
        disk.released.set()
    assert on_disk(tmp_path) == set()


def test_too_much_to_write_is_left_out(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as files:
        disk.occupy(files)
        for text in "abcdef":
            files.add(prefix(text))
        files.add(prefix("a"))  # waits already
        expected = "A prefix is not written: 4 others wait for the disk."
        assert caplog.messages == [expected] * 2
        files.discard(prefix("b"))  # makes room
        files.add(prefix("g"))
        disk.released.set()
    assert len(caplog.messages) == 2
    assert sorted(loaded(tmp_path)) == ["a", "c", "d", "g", "occupied"]


# -- a disk that fails ----------------------------------------------------------------------------


def test_a_write_that_fails_is_told_once_a_kind_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [errno.ENOSPC, errno.ENOSPC, errno.EIO, 0, errno.EIO]

    def fsync(_descriptor: int) -> None:
        number = failures.pop(0)
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("serve_app.engine.cache.files.os.fsync", fsync)
    with opened(tmp_path) as files:
        for text in "abcde":
            files.add(prefix(text))
            files._writer.submit(int).result()  # the queue is empty
    assert loaded(tmp_path) == ["d"]
    assert len(on_disk(tmp_path)) == 1
    assert len(caplog.messages) == 2
    assert "No space left" in caplog.messages[0]
    assert "Input/output error" in caplog.messages[1]


def test_a_folder_that_goes_away_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as files:
        (folder,) = tmp_path.iterdir()
        folder.rmdir()
        files.add(prefix("a"))
        files.discard(prefix("a"))
        files.add(prefix("b"))
    assert len(caplog.messages) <= 1


PROMPT = "a prompt that is long enough\n"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(WatchedBackend(n_slots=2), options(2, slot_folder=tmp_path / "slots")) as engine:
        yield engine


def slot_of(engine: Engine) -> tuple[int, int]:
    """The only slot with tokens, and how many they are."""
    (found,) = [(slot.id, slot.n_past) for slot in engine.stats().slots if slot.n_past]
    return found


def test_what_was_saved_is_there_again(engine: Engine, tmp_path: Path) -> None:
    text = ask(engine, request("a", PROMPT)).text
    slot, n_tokens = slot_of(engine)
    saved = engine.slot_files.save(slot, "a.bin")
    file = tmp_path / "slots" / "a.bin"
    assert (saved.n_tokens, saved.n_bytes) == (n_tokens, file.stat().st_size)
    assert file.stat().st_mode & 0o777 == 0o600
    assert engine.slot_files.erase(slot).n_tokens == n_tokens
    assert not any(one.n_past for one in engine.stats().slots)
    assert ask(engine, request("b", PROMPT)).end.usage.cached_tokens == 0
    engine.slot_files.erase(slot_of(engine)[0])
    restored = engine.slot_files.restore(1, "a.bin")
    assert (restored.n_tokens, restored.n_bytes) == (n_tokens, saved.n_bytes)
    assert slot_of(engine) == (1, n_tokens)
    again = ask(engine, request("c", PROMPT))
    assert again.text == text
    assert again.end.usage.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "x" * 129, "a\0"])
def test_files_are_in_the_folder(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="filename"):
        engine.slot_files.save(0, name)


@pytest.mark.parametrize("content", [None, b"", b"CorralPx", b"x" * 500])
def test_files_that_are_none(engine: Engine, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "slots").mkdir()
        (tmp_path / "slots" / "a.bin").write_bytes(content)
    with pytest.raises(InvalidRequestError) as refused:
        engine.slot_files.restore(0, "a.bin")
    assert refused.value.param == "filename"


@pytest.mark.parametrize("slot", [-1, 2, 99])
def test_slots_that_are_none(engine: Engine, slot: int) -> None:
    with pytest.raises(InvalidRequestError, match="no slot"):
        engine.slot_files.erase(slot)


def test_it_is_refused_without_a_folder() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        with pytest.raises(NotSupportedError, match=r"engine\.slot_folder"):
            engine.slot_files.save(0, "a")
        with pytest.raises(NotSupportedError, match=r"engine\.slot_folder"):
            engine.slot_files.erase(0)


@pytest.mark.parametrize("group", ["", "grüppe"])
def test_files_have_a_bound(tmp_path: Path, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "slots"
    opts = options(2, slot_folder=folder)
    monkeypatch.setattr(files, "MOST_BYTES", 2000)
    with running(WatchedBackend(n_slots=2), opts) as engine:
        ask(engine, request("a", PROMPT, group=group))
        slot, _ = slot_of(engine)
        size = engine.slot_files.save(slot, "a.bin").n_bytes
        others = 2000 - 2 * size
        assert others > 0
        (folder / "other").write_bytes(b"x" * others)
        assert engine.slot_files.save(slot, "b.bin").n_bytes == size  # to the last byte
        before = sorted(folder.iterdir())
        with pytest.raises(StorageFullError, match=rf"{size} bytes.*room for 0 of 2000") as refused:
            engine.slot_files.save(slot, "c.bin")
        assert refused.value.status == 507
        assert sorted(folder.iterdir()) == before
        assert engine.slot_files.save(slot, "a.bin").n_bytes == size, "it takes its own place"
        (folder / "b.bin").unlink()
        engine.slot_files.save(slot, "c.bin")


def test_the_disk_is_not_filled(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, request("a", PROMPT))
    slot, _ = slot_of(engine)
    size = engine.slot_files.save(slot, "a.bin").n_bytes
    free = [size - 1]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    with pytest.raises(StorageFullError, match=f"disk has {size - 1} left"):
        engine.slot_files.save(slot, "b.bin")
    assert [file.name for file in (tmp_path / "slots").iterdir()] == ["a.bin"]
    free[0] = size
    engine.slot_files.save(slot, "b.bin")


def test_a_busy_slot_is_left_alone(tmp_path: Path) -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, slot_folder=tmp_path)) as engine:
        (inbox,) = start(engine, request("a", PROMPT))
        backend.wait_for_batch()
        command = Command(lambda cache: cache.erase(0))
        engine.run_between_steps(command)
        backend.step()
        with pytest.raises(EngineUnavailableError, match="busy"):
            command.future.result(0)
        backend.resume()
        inbox.wait()


def test_nothing_is_done_after_the_end(tmp_path: Path) -> None:
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1, slot_folder=tmp_path))
    engine.close(0)
    with pytest.raises(EngineClosedError):
        engine.slot_files.erase(0)
