"""API keys: the file, and what each may use."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.base.errors import AuthenticationError, ConfigError
from serve_app.config.keys import ApiKey
from serve_app.server.access import api_keys, created_keys
from serve_app.server.access.api_keys import KeyAccounts, hash_keys
from serve_app.server.access.created_keys import with_secret
from serve_app.server.usage.ledger import Ledger

ANA, BEN = "ana-secret-0123456789", "ben-secret-0123456789"


def write(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(keys)}))
    return path


def test_keys_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA}, {"name": "ben", "key": BEN})
    accounts = KeyAccounts(path)
    assert accounts.find(ANA).key.name == "ana"
    assert accounts.find(BEN).key.name == "ben"


@pytest.mark.parametrize("secret", [None, "", "ana", ANA + "x", ANA.upper(), "\xe4\u20ac"])
def test_other_keys_are_not_valid(tmp_path: Path, secret: str | None) -> None:
    with pytest.raises(AuthenticationError):
        KeyAccounts(write(tmp_path / "keys", {"name": "ana", "key": ANA})).find(secret)


async def test_a_changed_file_is_read_again_and_what_was_used_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path)
    before = accounts.find(ANA)
    entry = {"name": "ana", "key": BEN, "max_prompt_tokens": 5}
    write(path, entry)
    await accounts.follow()
    after = accounts.find(BEN)
    assert after is before
    assert after.key.max_prompt_tokens == 5
    with pytest.raises(AuthenticationError):
        accounts.find(ANA)


@pytest.mark.parametrize("content", ["keys: []", "[", None])
async def test_a_file_that_is_broken_later_changes_nothing(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with caplog.at_level(logging.ERROR, "corral.ingress"):
        for _ in range(2):
            await accounts.follow()
            assert accounts.find(ANA).key.name == "ana"
    assert [one.levelname for one in caplog.records].count("ERROR") == 1


async def test_each_file_is_read_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that operators make is valid though the key file was damaged before."""
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path, Ledger(tmp_path / "usage"))
    path.write_text("[")
    assert accounts.created is not None
    key, secret = with_secret(ApiKey(name="ben", sha256="0" * 64))
    accounts.created.add(key)
    with caplog.at_level(logging.ERROR, "corral.ingress"):
        for _ in range(2):
            await accounts.follow()
            assert [accounts.find(one).key.name for one in (ANA, secret)] == ["ana", "ben"]
    assert [one.levelname for one in caplog.records].count("ERROR") == 1
    write(path, {"name": "ben", "key": BEN})  # the key file's names come first
    await accounts.follow()
    assert accounts.find(BEN).key.name == "ben"
    with pytest.raises(AuthenticationError):
        accounts.find(secret)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("keys: []", "keys: List should have at least 1 item"),
        ("[", "it is not YAML"),
        ("[" * 101, "it is nested too deeply"),
        ("- " * 101, "it is nested too deeply"),
        ("keys: [{name: a}]", "keys.0: Value error, either `key` or `sha256` is needed"),
        ("keys: [{name: a, key: short}]", "keys.0.key: String should have at least 16"),
        (f"keys: [{{name: a, key: {ANA}, limit: 3}}]", "keys.0.limit: there is no such field"),
        (f"keys: [{{name: a, key: {ANA}}}, {{name: a, key: {BEN}}}]", "the same name"),
        (f"keys: [{{name: a, key: {ANA}}}, {{name: b, key: {ANA}}}]", "or are the same"),
        (
            f"keys: [{{name: {'a' * 257}, key: {ANA}}}]",
            "keys.0.name: String should have at most 256",
        ),
    ],
)
def test_a_file_that_is_wrong_stops_the_start_and_shows_no_key(
    tmp_path: Path, content: str, fault: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        KeyAccounts(path)
    assert fault in refused.value.message
    assert ANA not in refused.value.message
    assert "short" not in refused.value.message.replace("shorter", "")


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyAccounts(tmp_path / "keys")


HASHED = hashlib.sha256(ANA.encode()).hexdigest()


def test_a_hash_stands_for_its_key_and_is_none_itself(tmp_path: Path) -> None:
    accounts = KeyAccounts(write(tmp_path / "keys", {"name": "ana", "sha256": HASHED}))
    assert accounts.find(ANA).key.name == "ana"
    with pytest.raises(AuthenticationError):
        accounts.find(HASHED)


def test_keys_that_can_be_read_are_warned_of_and_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "corral.ingress"):
        KeyAccounts(write(tmp_path / "hashed", {"name": "ana", "sha256": HASHED}))
        assert not caplog.records
        accounts = KeyAccounts(write(tmp_path / "plain", {"name": "ana", "key": ANA}))
    assert "corral hash-keys" in caplog.text
    assert ANA not in caplog.text
    assert accounts.find(ANA).key.key is None


@pytest.mark.parametrize(
    "text",
    [
        "# who may ask\nkeys:\n  - name: ana  # search\n    key: {0}  # secret\n    admin: true\n"
        "  - {{key: '{1}', name: ben}}\n",
        '{{"keys": [{{"name": "ana", "key": "{0}", "admin": true}}, {{"key": "{1}", "name": "ben"}}]}}',
        f"keys:\n- name: ana\n  sha256: {HASHED}\n  admin: true\n- key: {{1}}\n  name: ben",
    ],
)
def test_keys_of_a_file_are_replaced_by_hashes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text.format(ANA, BEN))
    path.chmod(0o640)
    assert hash_keys(path) == text.format(ANA, BEN).count("key: ") + text.count('"key"')
    written = path.read_text()
    assert ANA not in written
    assert BEN not in written
    assert written.count("# secret") == text.count("# secret")
    assert path.stat().st_mode & 0o777 == 0o640
    accounts = KeyAccounts(path)
    assert accounts.find(ANA).key.admin
    assert accounts.find(BEN).key.name == "ben"
    assert hash_keys(path) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_file_whose_keys_cannot_be_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [")
    with pytest.raises(ConfigError):
        hash_keys(path)
    assert path.read_text() == "keys: ["


def test_a_key_that_no_header_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyAccounts(write(tmp_path / "keys", {"name": "ana", "key": "two words of sixteen"}))


def test_a_file_that_nobody_can_read_as_keys_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content in (b"\xff\xfe\x00", b"keys: 2024-13-45"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="it is not YAML"):
            KeyAccounts(path)


async def test_a_revoked_key_is_refused_though_the_file_could_not_be_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a free descriptor, for one. The same of the keys that operators make."""
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA}, {"name": "ben", "key": BEN})
    accounts = KeyAccounts(path, Ledger(tmp_path / "usage"))
    assert accounts.created is not None
    key, secret = with_secret(ApiKey(name="cleo", sha256="0" * 64))
    accounts.created.add(key)
    await accounts.follow()
    write(path, {"name": "ben", "key": BEN})
    accounts.created.revoke("cleo")

    def no_descriptor(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as without, caplog.at_level(logging.ERROR, "corral.ingress"):
        without.setattr(os, "open", no_descriptor)
        for _ in range(3):
            await accounts.follow()
            assert accounts.find(ANA).key.name == "ana"
            assert accounts.find(secret).key.name == "cleo"
    assert [one.levelname for one in caplog.records].count("ERROR") == 2, "each once"
    await accounts.follow()
    assert accounts.find(BEN).key.name == "ben"
    for revoked in (ANA, secret):
        with pytest.raises(AuthenticationError):
            accounts.find(revoked)


async def test_a_file_of_the_same_time_and_size_is_another_one(tmp_path: Path) -> None:
    """As `rsync --times` writes it."""
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts, before = KeyAccounts(path), path.stat()
    write(path, {"name": "ben", "key": BEN})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    await accounts.follow()
    with pytest.raises(AuthenticationError):
        accounts.find(ANA)


async def test_what_is_no_file_or_a_huge_one_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path)
    path.unlink()
    os.mkfifo(path)
    await accounts.follow()
    path.unlink()
    path.mkdir()
    await accounts.follow()
    path.rmdir()
    monkeypatch.setattr(created_keys, "MOST_FILE_BYTES", 100)
    path.write_text("#" * 101)
    await accounts.follow()
    assert accounts.find(ANA).key.name == "ana"
    for reason in ("It is no ordinary file", "It has more than 100 bytes"):
        assert caplog.text.count(reason) == 1


async def test_a_file_that_is_read_slowly_counts_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on with the previous keys meanwhile, and it is read once for all of them."""
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts, on, began = KeyAccounts(path), threading.Event(), threading.Semaphore(0)
    read_file = created_keys.read_file

    def slowly(path: Path) -> bytes:
        began.release()
        on.wait(60)
        return read_file(path)

    write(path, {"name": "ben", "key": BEN})
    with monkeypatch.context() as slow:
        slow.setattr(api_keys, "read_file", slowly)
        slow.setattr(api_keys, "READ_S", 0.01)
        for _ in range(3):
            await accounts.follow()
            assert accounts.find(ANA).key.name == "ana"
        assert began.acquire(blocking=False)
        assert not began.acquire(blocking=False)
    waiting = asyncio.gather(*(accounts.follow() for _ in range(3)))
    on.set()
    await waiting
    assert accounts.find(BEN).key.name == "ben"
    with pytest.raises(AuthenticationError):
        accounts.find(ANA)
