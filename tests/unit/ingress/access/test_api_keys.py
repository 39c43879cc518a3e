"""API keys: the file, and what each may use."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import (
    AuthenticationError,
    ConfigError,
    KeyLimitError,
    NoRoomError,
    RateLimitError,
)
from serve_app.ingress.access.api_keys import KeyAccounts, hash_keys
from serve_app.ingress.http.request_context import FORGIVEN_S, RETRY_S, Account, ApiKey, Caller

ANA, BEN = "ana-secret-0123456789", "ben-secret-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(keys)}))
    return path


def account(clock: Clock | None = None, **limits: int) -> Account:
    key = ApiKey.model_validate({"name": "ana", "key": ANA, **limits})
    return Account(key, clock or Clock())


def test_keys_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA}, {"name": "ben", "key": BEN})
    accounts = KeyAccounts(path)
    assert accounts.find(ANA).key.name == "ana"
    assert accounts.find(BEN).key.name == "ben"


@pytest.mark.parametrize("secret", [None, "", "ana", ANA + "x", ANA.upper(), "\xe4\u20ac"])
def test_other_keys_are_not_valid(tmp_path: Path, secret: str | None) -> None:
    with pytest.raises(AuthenticationError):
        KeyAccounts(write(tmp_path / "keys", {"name": "ana", "key": ANA})).find(secret)


def test_a_changed_file_is_read_again_and_what_was_used_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path)
    before = accounts.find(ANA)
    entry = {"name": "ana", "key": BEN, "max_prompt_tokens": 5}
    write(path, entry)
    after = accounts.find(BEN)
    assert after is before
    assert after.key.max_prompt_tokens == 5
    with pytest.raises(AuthenticationError):
        accounts.find(ANA)


@pytest.mark.parametrize("content", ["keys: []", "[", None])
def test_a_file_that_is_broken_later_changes_nothing(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys", {"name": "ana", "key": ANA})
    accounts = KeyAccounts(path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with caplog.at_level(logging.ERROR, "corral.ingress"):
        assert accounts.find(ANA).key.name == "ana"
        assert accounts.find(ANA).key.name == "ana"
    assert [one.levelname for one in caplog.records].count("ERROR") == 1


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("keys: []", "keys: List should have at least 1 item"),
        ("[", "it is not YAML"),
        ("keys: [{name: a}]", "keys.0: Value error, either `key` or `sha256` is needed"),
        ("keys: [{name: a, key: short}]", "keys.0.key: String should have at least 16"),
        (f"keys: [{{name: a, key: {ANA}, limit: 3}}]", "keys.0.limit: Extra inputs"),
        (f"keys: [{{name: a, key: {ANA}}}, {{name: a, key: {BEN}}}]", "the same name"),
        (f"keys: [{{name: a, key: {ANA}}}, {{name: b, key: {ANA}}}]", "or are the same"),
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


def test_requests_at_once() -> None:
    own = account(max_concurrent_requests=2)
    own.enter()
    own.enter()
    with pytest.raises(RateLimitError, match="2 requests at once") as refused:
        own.enter()
    assert refused.value.retry_after_s == 1
    own.leave()
    own.enter()


def test_the_largest_prompt() -> None:
    own = account(max_prompt_tokens=10)
    own.admit(10)
    with pytest.raises(KeyLimitError, match=r"11 prompt tokens.*allows 10"):
        own.admit(11)


def test_tokens_of_a_minute() -> None:
    clock = Clock()
    own = account(clock, tokens_per_minute=60)
    own.admit(40)
    own.charge(30)  # the answer, 10 more than there are
    with pytest.raises(RateLimitError) as refused:
        own.admit(5)
    assert refused.value.retry_after_s == 15
    clock.now += 14.9
    with pytest.raises(RateLimitError):
        own.admit(5)
    clock.now += 0.2
    own.admit(5)
    clock.now += 3600
    own.admit(60)  # no more than a minute's tokens are saved up
    with pytest.raises(RateLimitError):
        own.admit(1)


def test_a_prompt_of_more_than_a_minutes_tokens_waits_for_a_whole_minute() -> None:
    clock = Clock()
    own = account(clock, tokens_per_minute=60)
    own.admit(600)
    clock.now += 500
    with pytest.raises(RateLimitError):
        own.admit(600)
    clock.now += 100
    own.admit(600)


def test_without_limits_nothing_is_refused() -> None:
    own = account()
    for _ in range(1000):
        own.enter()
        own.admit(10**6)
        own.charge(10**6)


def test_each_answer_counts_as_a_request() -> None:
    account = Account(ApiKey(name="ana", key="a" * 16, max_concurrent_requests=4))
    caller = Caller(account=account)
    with caller.running():
        caller.ask_for(3)
        other = Caller(account=account)
        with other.running(), pytest.raises(RateLimitError, match="4 are running"):
            other.ask_for(2)
        with pytest.raises(KeyLimitError, match="This API key allows 4"):
            caller.ask_for(5)
    account.enter(4)


def test_who_was_refused_is_refused_at_once_until_it_has_waited() -> None:
    clock = Clock()
    ana, ben = account(clock), account(clock)
    ana.enter()
    ana.refused()
    with pytest.raises(NoRoomError) as told:
        ana.enter()
    assert told.value.retry_after_s == RETRY_S
    ana.enter(31, besides=1)  # one that is in already
    ben.enter()
    clock.now += RETRY_S
    ana.enter()


def test_after_a_refusal_one_at_a_time_tries_until_one_is_served() -> None:
    clock = Clock()
    ana = account(clock)
    ana.refused()
    for _ in range(3):
        clock.now += RETRY_S
        ana.enter()
        with pytest.raises(NoRoomError):
            ana.enter()
    ana.served()
    ana.enter()
    ana.enter()


def test_who_stays_away_for_some_seconds_may_come_with_several() -> None:
    clock = Clock()
    ana = account(clock)
    ana.refused()
    clock.now += RETRY_S + FORGIVEN_S
    ana.enter()
    ana.enter()


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
