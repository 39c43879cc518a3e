"""What the search for costly requests draws, and how it says what a finding needs."""

from __future__ import annotations

from typing import Any

from hypothesis import find

from loadtests.hostile import search
from loadtests.hostile.search import BARS, Cost, Search


class Costly:
    """A server on which requests with `stop` and `grammar` cost a token too much, three of four times."""

    def __init__(self) -> None:
        self.n_requests = 0

    def cost(self, path: str, body: dict[str, Any]) -> Cost:
        self.n_requests += 1
        return Cost(token_ms=9 if {"stop", "grammar"} <= body.keys() else 1)


def test_a_finding_has_the_fields_that_it_needs() -> None:
    looked = Search(Costly(), until=0)  # type: ignore[arg-type]
    body = {"prompt": "a", "max_tokens": 1, "stop": ["a"], "top_k": 3, "grammar": "b", "seed": 1}
    looked._look("/completion", body)
    looked._look("/completion", body | {"n_cmpl": 2})  # the same, which is known
    looked._look("/completion", {"prompt": "a", "max_tokens": 1, "stop": ["a"]})
    ((found, cost),) = looked.findings.values()
    assert found.keys() == {"prompt", "max_tokens", "stop", "grammar"}
    assert cost.over == ["token_ms"]
    assert looked.n_requests == 3


def test_what_is_over_its_bar_once_only_is_no_finding() -> None:
    class Hiccup(Costly):
        def cost(self, path: str, body: dict[str, Any]) -> Cost:
            self.n_requests += 1
            return Cost(callback_ms=999 if self.n_requests == 1 else 1)

    looked = Search(Hiccup(), until=0)  # type: ignore[arg-type]
    looked._look("/completion", {"prompt": "a", "max_tokens": 1})
    assert looked.findings == {}
    assert BARS.over == []


def test_values_reach_the_bounds_of_a_schema() -> None:
    number = search._values({"type": "integer", "minimum": -1, "maximum": 7}, {})
    assert find(number, lambda value: value == -1) == -1
    assert find(number, lambda value: value == 7) == 7
    texts = {"type": "array", "maxItems": 256, "items": {"type": "string", "maxLength": 1024}}
    assert len(find(search._values(texts, {}), lambda value: len(value) == 256)) == 256
    schemas = {"Mode": {"enum": ["on", "off"]}}
    mode = search._values(
        {"anyOf": [{"$ref": "#/components/schemas/Mode"}, {"type": "null"}]}, schemas
    )
    assert find(mode, lambda value: value == "off") == "off"
