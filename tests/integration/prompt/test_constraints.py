"""Places in grammars, also in those that wait for a trigger, over the built-in model's vocabulary."""

from __future__ import annotations

import re

import pytest

from serve_app.base.sampling import Triggers
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.model import Model
from serve_app.prompt import grammars
from serve_app.store.builtin_model import BUILTIN_MODEL

MODEL = Model(BUILTIN_MODEL, vocab_only=True)
CALL = grammars.from_gbnf('root ::= "<f>" [0-9]+ "</f>"', "grammar")


def tokens(text: str) -> list[int]:
    return MODEL.tokenize(text, add_special=False, parse_special=False)


def taken(constraint: Constraint, text: str) -> str:
    """As much of the text as it takes."""
    given = tokens(text)
    n = next((i for i, token in enumerate(given) if not constraint.take(token)), len(given))
    return MODEL.detokenize(given[:n])


@pytest.mark.parametrize(
    ("pattern", "differs_at"),
    [
        ("a{300}", None),
        ("a{300}", 5),
        ("the answer is (forty two|forty three), and that is that[.!]", None),
    ],
)
def test_a_text_that_is_forced_has_the_masks_of_each_place(
    pattern: str, differs_at: int | None
) -> None:
    """What is known from one place is what would be found at the next ones, also after another token than
    the one that was forced, and for whoever begins anew."""
    grammar = grammars.from_regex(pattern, "regex")
    constraint, past = MODEL.constraint(grammar), list[int]()
    while not constraint.complete:
        anew = MODEL.constraint(grammar).fresh()
        assert all(anew.take(token) for token in past)
        mask = constraint.token_mask()
        assert mask.tolist() == anew.token_mask().tolist()
        token = tokens("a")[0] if len(past) == differs_at else int(mask.nonzero()[0][0])
        assert constraint.take(token)
        past.append(token)
    assert re.fullmatch(pattern, MODEL.detokenize(past))


def test_the_text_is_free_up_to_the_trigger() -> None:
    lazy = MODEL.constraint(CALL, Triggers(texts=("<none>", "<f>")))
    assert taken(lazy, "Anything. Call: ") == "Anything. Call: "
    assert lazy.token_mask().all()
    assert not lazy.complete
    assert taken(lazy, "<f>12") == "<f>12"
    assert not lazy.token_mask().all()
    assert lazy.take(tokens("x")[0]) is False
    assert lazy.fault is None
    assert taken(lazy, "</f>") == "</f>"
    assert lazy.complete


def test_a_token_as_the_trigger() -> None:
    (token,) = MODEL.tokenize("<|im_start|>", add_special=False, parse_special=True)
    grammar = grammars.from_gbnf('root ::= "<|im_start|>" [0-9]', "grammar")
    lazy = MODEL.constraint(grammar, Triggers(tokens=(token,)))
    assert taken(lazy, "12 ") == "12 "
    assert lazy.take(token)
    assert not lazy.take(tokens("x")[0])
    assert lazy.take(tokens("7")[0])
    assert lazy.complete


def test_a_trigger_that_the_grammar_does_not_begin_with() -> None:
    lazy = MODEL.constraint(CALL, Triggers(texts=("<g>",)))
    assert taken(lazy, "some <g> more").startswith("some <g")
    assert "does not begin with its trigger, '<g>'" in (lazy.fault or "")
    assert not lazy.take(tokens("a")[0])
