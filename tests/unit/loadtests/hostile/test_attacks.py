"""What attackers send, without sending it: bounded, what it says it is, and all families there."""

from __future__ import annotations

import gzip
import json
import re
from itertools import groupby

import pytest

from loadtests.common.servers import ROOT
from loadtests.hostile import bodies
from loadtests.hostile.__main__ import chosen
from loadtests.hostile.attack import ALONE, KEYED, KEYLESS, MIB, MOST_BODY_BYTES, SHARED
from loadtests.hostile.attacks import ATTACKS, FAMILIES, block, crash, grammar, smuggle
from loadtests.hostile.scene import CUT, status_of

MOST_SECONDS = 60


def test_every_family_of_attacks_is_there() -> None:
    assert set(FAMILIES) == {
        "control", "crash", "web", "replica", "block", "grammar", "starve", "charge", "hold",
        "silence", "spy", "connections", "operate", "smuggle", "sampling", "batch", "mixed",
    }  # fmt: skip
    assert {attack.server for attack in ATTACKS} == {ALONE, KEYED, KEYLESS, SHARED}


def test_attacks_are_bounded_and_say_what_they_do() -> None:
    for attack in ATTACKS:
        assert 0 < attack.seconds <= MOST_SECONDS, attack.name
        assert attack.what.endswith("."), attack.name
        assert attack.expects.endswith("."), attack.name


def test_names_are_unique_and_fit_an_argument() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


def test_the_document_has_a_row_for_each_attack_and_their_number() -> None:
    document = (ROOT / "docs/security.md").read_text()
    rows = set(re.findall(r"^\| (\w+: [^|]+?) \|", document, re.MULTILINE))
    assert rows == {f"{attack.family}: {attack.name}" for attack in ATTACKS}
    n = sum(attack.family != "control" for attack in ATTACKS)
    assert f"attacks a server in {n} ways" in document


def test_attacks_of_one_server_follow_each_other() -> None:
    servers = [attack.server for attack in ATTACKS]
    assert [server for server, _ in groupby(servers)] == [SHARED, KEYLESS, KEYED, ALONE]


def test_the_short_form_has_the_gravest_families() -> None:
    short = chosen((), (), short=True)
    assert {attack.family for attack in short} == set(FAMILIES)
    assert len(short) < len(ATTACKS) / 2


def test_families_and_names_are_chosen() -> None:
    assert {attack.family for attack in chosen(("spy", "web"), (), short=False)} == {"spy", "web"}
    (one,) = chosen((), ("cached_tokens",), short=False)
    assert one.name == "cached_tokens"
    assert chosen(("web",), ("cached_tokens",), short=False) == []


@pytest.mark.parametrize("name", block.BODIES)
def test_blocking_bodies_are_what_a_server_takes(name: str) -> None:
    _, make = block.BODIES[name]
    sizes = [len(body) for _, body in make()]
    assert max(sizes) > 700_000, "this blocks nobody"
    assert max(sizes) <= MOST_BODY_BYTES


def test_crashing_bodies_are_bounded_and_of_one_character() -> None:
    largest = crash.ROUTES["tool arguments"][:1]  # texts in texts
    assert 3 * 10**6 < max(len(shot.body) for shot in crash.shots(largest)) <= MOST_BODY_BYTES
    prompts = {json.loads(shot.body)["prompt"] for shot in crash.shots(crash.ROUTES["prompt"][:1])}
    assert {len(prompt) for prompt in prompts} == set(crash.LENGTHS)
    assert {frozenset(prompt) for prompt in prompts} == {frozenset(c) for c in crash.CHARACTERS}


def test_grammars_are_bounded() -> None:
    texts = [*grammar.REGEXES, *grammar.GRAMMARS, *map(json.dumps, grammar.schemas())]
    assert max(map(len, texts)) < MOST_BODY_BYTES
    for text in grammar.GRAMMARS:
        assert "root ::=" in text


def test_bodies_are_filled() -> None:
    assert json.loads(bodies.filled({"a": 1}, "b", "xy", 10)) == {"a": 1, "b": "xyxyxyxyxy"}
    assert json.loads(bodies.listed({"a": 1}, "b", "[]", 9)) == {"a": 1, "b": [[], [], []]}
    assert json.loads(bodies.listed({}, "b", "-1", 1)) == {"b": [-1]}
    assert json.loads(bodies.nested({}, "b", 3)) == {"b": [[[]]]}
    assert len(json.loads(bodies.keyed(1200))) == 100
    assert len(json.loads(bodies.keyed(1200, distinct=False))) == 1
    assert json.loads(bodies.run_of("\n", 5, lambda text: [text])) == ["\n" * 5]


def test_schemas_mean_more_than_they_say() -> None:
    refs = bodies.refs_schema(64)
    assert len(refs["$defs"]) == 64
    assert refs["$defs"]["d63"] == {"type": "string"}
    assert refs["$defs"]["d0"]["properties"]["b"] == {"$ref": "#/$defs/d1"}
    assert len(json.dumps(bodies.doubling_schema(12))) > 2**12


def test_a_bomb_is_small() -> None:
    packed = bodies.gzip_bomb(4 * MIB)
    assert len(packed) < 4 * MIB / 500
    assert gzip.decompress(packed) == b" " * 4 * MIB


def test_a_hidden_request_is_inside_the_length() -> None:
    for both in smuggle.BOTH:
        assert both.endswith(b"\r\n")
        assert b"Content-Length" in both


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.0 400 Bad Request\r\n", 400),
        (b"", CUT),
        (b"\x15\x03\x01", CUT),
        (b"HTTP/1.1 \r\n", CUT),
    ],
)
def test_status_of_raw_bytes(answer: bytes, status: int) -> None:
    assert status_of(answer) == status
