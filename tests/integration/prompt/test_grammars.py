"""Answers that must match something, from a model that would say something else."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from serve_app.base.errors import ConstraintError, InvalidRequestError
from serve_app.base.sampling import LogitBias
from serve_app.engine import (
    Engine,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SequenceEnd,
)
from serve_app.prompt import grammars, json_schemas
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL

TOKENIZER = Tokenizer(BUILTIN_MODEL)
PROMPT = TOKENIZER.encode_chat([Turn("user", ("Name three fruits.",))])
NAMES = st.text("abcxyz_", min_size=1, max_size=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(
        n_slots=8, n_ctx_slot=1024, threads=1, n_batch=256, max_waiting=64, profile_limit_s=0
    )
    engine = Engine.load(BUILTIN_MODEL, options)
    yield engine
    engine.close(0)


async def say(
    engine: Engine, grammar: str, name: str = "a", **sampling: Any
) -> tuple[str, list[int], SequenceEnd]:
    params = SamplingParams(grammar=grammar, **{"max_tokens": 600, "seed": 1, **sampling})
    text, tokens, end = "", list[int](), None
    async for delta in engine.submit(GenerationRequest(name, PROMPT, params)):
        text, end = text + delta.text, delta.end
        tokens += delta.token_ids
    assert end is not None
    return text, tokens, end


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (grammars.from_regex("[a-f]{3}-[0-9]{2}", "regex"), "[a-f]{3}-[0-9]{2}"),
        (grammars.from_gbnf('root ::= ("ja" | "nein") "!"', "grammar"), "(ja|nein)!"),
        (grammars.from_json_schema({"enum": ["on", "off"]}, "json_schema"), '"(on|off)"'),
    ],
)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 2.0}, {"ignore_eos": True}]
)
async def test_the_text_matches_and_ends_by_itself(
    engine: Engine, grammar: str, pattern: str, sampling: dict[str, Any]
) -> None:
    text, _, end = await say(engine, grammar, **sampling)
    assert re.fullmatch(pattern, text)
    assert end.reason == FinishReason.STOP


async def test_a_grammar_that_allows_what_would_be_said_changes_nothing(engine: Engine) -> None:
    anything = grammars.from_regex(r"(?s:.*)", "regex")
    for seed in range(4):
        within, free = [
            await say(engine, grammar, seed=seed, max_tokens=40)  # type: ignore[arg-type]
            for grammar in (anything, None)
        ]
        assert within == (free[0], free[1], within[2])
        assert within[2].reason == free[2].reason


async def test_draws_are_from_what_is_allowed(engine: Engine) -> None:
    """As often as the model's own probabilities say, among the two that may be."""
    grammar = grammars.from_regex("[AB]", "regex")
    n = 400
    texts = await asyncio.gather(
        *(asyncio.wait_for(say_later(engine, grammar, i), timeout=60) for i in range(n))
    )
    (_, _, logprobs) = await first_logprobs(engine)
    likely = {letter: math.exp(logprobs[letter]) for letter in "AB"}
    expected = n * likely["A"] / (likely["A"] + likely["B"])
    spread = math.sqrt(n * 0.25)
    assert abs(texts.count("A") - expected) < 4 * spread


LIMIT = asyncio.Semaphore(32)


async def say_later(engine: Engine, grammar: str, seed: int) -> str:
    async with LIMIT:
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return (await say(engine, grammar, f"n{seed}", seed=seed, **plain))[0]


async def first_logprobs(engine: Engine) -> tuple[str, float, dict[str, float]]:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOKENIZER.model.n_vocab)
    async for delta in engine.submit(GenerationRequest("logprobs", PROMPT, params)):
        (found,) = delta.logprobs
        by_text = {TOKENIZER.decode([token]): logprob for token, logprob in found.top}
        assert math.isclose(sum(math.exp(x) for _, x in found.top), 1.0, rel_tol=1e-4)
        assert found.logprob == found.top[0][1]
        assert [x for _, x in found.top] == sorted((x for _, x in found.top), reverse=True)
        return delta.text, found.logprob, by_text
    raise AssertionError


async def test_a_sequence_that_can_say_nothing_ends_alone(engine: Engine) -> None:
    grammar = grammars.from_regex("[0-9]{3}", "regex")
    digits = [t for t in range(TOKENIZER.model.n_vocab) if re.search(rb"[0-9]", TOKENIZER.piece(t))]
    banned = LogitBias.of(dict.fromkeys(digits, -math.inf))
    failed, other = await asyncio.gather(
        say(engine, grammar, "failed", logit_bias=banned),
        say(engine, grammar, "other"),
        return_exceptions=True,
    )
    assert isinstance(failed, ConstraintError)
    assert not isinstance(other, BaseException)
    assert re.fullmatch("[0-9]{3}", other[0])
    assert [slot.state for slot in engine.stats().slots] == ["idle"] * 8


def test_an_expression_that_blows_up_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is decoded with: others would wait for it. With a small vocabulary, that takes a smaller
    limit."""
    limits = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=10)
    monkeypatch.setattr("serve_app.kernels.llama.model.LIMITS", limits)
    grammar = grammars.from_regex("([a-z]{1,50}x){50}", "regex")
    with pytest.raises(InvalidRequestError, match="takes too much"):
        engine.prepare(GenerationRequest("a", (5,), SamplingParams(grammar=grammar)))


@pytest.mark.parametrize("expression", ["(a?){500}a{500}", "(a{1000}){1000}"])
def test_an_expression_that_blows_up_when_it_is_copied_is_refused(
    engine: Engine, expression: str
) -> None:
    grammar = grammars.from_regex(expression, "regex")
    with pytest.raises(InvalidRequestError, match="takes too much"):
        engine.prepare(GenerationRequest("a", (5,), SamplingParams(grammar=grammar)))


async def test_a_grammar_that_takes_too_much_later_is_the_clients_fault(engine: Engine) -> None:
    """The error has one line, without llguidance's state."""
    choices = " | ".join(f'"{number}"' for number in range(20_000))
    with pytest.raises(ConstraintError, match=r"Current row has \d+ items") as failed:
        await say(engine, grammars.from_gbnf(f"root ::= {choices}", "grammar"))
    assert (failed.value.status, "\n" in failed.value.message) == (400, False)


async def test_what_is_no_grammar_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        engine.submit(GenerationRequest("a", PROMPT, SamplingParams(grammar="start: nothing")))


# -- random schemas -------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, n: {"type": "number", "minimum": low, "maximum": low + n},
        st.integers(-50, 50),
        st.integers(1, 50),
    ),
    st.builds(
        lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n},
        st.integers(0, 4),
        st.integers(0, 8),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(NAMES, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, NAMES | st.integers(-9, 9)),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-z]{2,5}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": ["integer", "null"], "minimum": 3, "maximum": 12},
        ]
    ),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.builds(
        lambda properties, optional: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name not in optional],
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.sets(NAMES, max_size=2),
    )
    arrays = st.builds(
        lambda items, low, n: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + n,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    either = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return objects | arrays | either


SCHEMAS = st.recursive(SCALARS, nested, max_leaves=6)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schemas=st.lists(SCHEMAS, min_size=16, max_size=16), seed=st.integers(0, 2**31))
def test_texts_of_random_schemas_validate(
    engine: Engine, schemas: list[dict[str, Any]], seed: int
) -> None:
    async def run() -> None:
        answers = await asyncio.gather(
            *(
                say(engine, grammars.from_json_schema(schema, "json_schema"), str(i), seed=seed + i)
                for i, schema in enumerate(schemas)
            )
        )
        for schema, (text, _, end) in zip(schemas, answers, strict=True):
            if end.reason == FinishReason.LENGTH:
                # A number's digits may go on for ever, and lists of lists of UUIDs are long.
                assert any(f'"{kind}"' in json.dumps(schema) for kind in ("number", "uuid")), text
            else:
                jsonschema.validate(json.loads(text), schema)

    asyncio.run(run())


LITERAL = "a" * (json_schemas.MAX_LITERAL_CHARS + 1)


@pytest.mark.parametrize(
    "translate",
    [
        pytest.param(lambda: grammars.from_json_schema({"const": LITERAL}, "p"), id="const"),
        pytest.param(
            lambda: grammars.from_json_schema({"properties": {"a": {"enum": ["b", LITERAL]}}}, "p"),
            id="enum",
        ),
        pytest.param(
            lambda: grammars.from_json_schema({"properties": {LITERAL: {}}}, "p"), id="name"
        ),
        pytest.param(lambda: grammars.from_gbnf(f'root ::= "b" "{LITERAL}"', "p"), id="gbnf"),
        pytest.param(lambda: grammars.from_regex(LITERAL, "p"), id="regex"),
    ],
)
def test_long_literals_are_refused(translate: Callable[[], str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"p: .*(more|longer) than 16384 char"):
        translate()


def test_what_a_schema_says_to_people_may_be_long() -> None:
    said = {"type": "string", "description": LITERAL, "maxLength": 3}
    assert grammars.from_json_schema({"properties": {"description": said}}, "p")
