"""Who sent a request, and what follows of that."""

from __future__ import annotations

import itertools

import pytest

from serve_app.base.values.adapters import SHARED_GROUP
from serve_app.config.keys import ApiKey
from serve_app.server.http.request_context import Caller
from serve_app.server.usage.accounts import KeyAccount
from serve_app.server.usage.ledger import Ledger

SALTS = [None, "", "a", "b", "ab", "null", '"', ', "', "\0", "\ud800", "\udfff", "é", "e\u0301"]


def caller(name: str | None, group: str | None = None) -> Caller:
    if name is None:
        return Caller()
    key = ApiKey(name=name, key="0123456789abcdef", cache_group=group)
    return Caller(account=KeyAccount(key, Ledger()))


def test_cache_groups_differ_where_the_key_or_the_salt_does() -> None:
    callers = [caller(name) for name in (None, "a", "b", "ab", "null", "None", 'a", "b', "*")]
    found = [one.cache_group(salt) for one, salt in itertools.product(callers, SALTS)]
    assert len(set(found)) == len(callers) * len(SALTS)
    assert SHARED_GROUP not in found


@pytest.mark.parametrize("salt", SALTS, ids=repr)
def test_a_keys_group_stands_for_its_name(salt: str | None) -> None:
    named, member = caller("team"), caller("ana", "team")
    assert named.cache_group(salt) == member.cache_group(salt)
    assert caller("ana").cache_group(salt) != member.cache_group(salt)


def test_a_cache_group_is_the_same_in_every_process() -> None:
    assert caller(None).cache_group(None) == ""
    assert caller("ana").cache_group(None) == "c62f814b4123efd0f27ca8bfc2c77ae6"
