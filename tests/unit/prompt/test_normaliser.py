"""Conversations of any shape, as each kind of template takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import InvalidRequestError
from serve_app.prompt import normaliser
from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.conversation import PastCall, Turn
from serve_app.prompt.template_caps import TemplateCaps
from tests.unit.prompt.tool_calls.formats import TEMPLATES, TOOLS, every_template, template_at

FREE = TemplateCaps(parallel_calls=True, object_arguments=True)
NO_SYSTEM = replace(FREE, system=False)
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def turns(shape: str) -> list[Turn]:
    """`s1 u1` as a system message with the text `s1` and a user's turn; `c1` is a call, `t1` its result."""
    made = []
    for word in shape.split():
        kind, text = word[0], word
        if kind == "c":
            calls = tuple(PastCall("f", "{}", number) for number in word[1:])
            made.append(Turn("assistant", (), calls=calls))
        elif kind == "t":
            made.append(Turn("tool", (text,), call_id=word[1:]))
        else:
            made.append(Turn(ROLES[kind], (text,)))  # type: ignore[arg-type]
    return made


def shape_of(conversation: list[Turn]) -> list[tuple[str, str]]:
    return [
        (turn.role[0], "+".join([turn.text, *(call.call_id for call in turn.calls)]))
        for turn in conversation
    ]


def late(text: str) -> str:
    return f"<system>\n{text}\n</system>"


def result(text: str) -> str:
    return f"<tool>\n{text}\n</tool>"


@pytest.mark.parametrize(
    ("shape", "caps", "expected"),
    [
        ("s1 s2 u1", FREE, ["s s1\n\ns2", "u u1"]),
        ("s1 s2 u1", NO_SYSTEM, ["u s1\n\ns2\n\nu1"]),
        ("s1 u1", NO_SYSTEM, ["u s1\n\nu1"]),
        ("s1 a1 u1", NO_SYSTEM, ["u s1", "a a1", "u u1"]),
        ("s1", NO_SYSTEM, ["u s1"]),
        ("s1", FREE, ["s s1", "u "]),
        ("", FREE, ["u "]),
        ("a1 u1", FREE, ["u ", "a a1", "u u1"]),
        ("s1 a1 u1", FREE, ["s s1", "u ", "a a1", "u u1"]),
        ("u1 u2 a1 a2 u3", FREE, ["u u1\n\nu2", "a a1\n\na2", "u u3"]),
        ("u1 a1 s1 u2", FREE, ["u u1", "a a1", f"u {late('s1')}\n\nu2"]),
        ("u1 s1", FREE, [f"u u1\n\n{late('s1')}"]),
        ("u1 c1 s1 t1 a1", FREE, ["u u1", "a +1", "t t1", "a ", f"u {late('s1')}", "a a1"]),
        ("u1 t1 u2", FREE, [f"u u1\n\n{result('t1')}\n\nu2"]),
        ("u1 c1 t1 u2", FREE, ["u u1", "a +1", "t t1", "a ", "u u2"]),
        ("u1 c1 u2", FREE, ["u u1", "a +1", "a ", "u u2"]),
        ("u1 c12 t1 t2 a1", FREE, ["u u1", "a +1+2", "t t1", "t t2", "a a1"]),
    ],
)
def test_the_strict_shape(shape: str, caps: TemplateCaps, expected: list[str]) -> None:
    made = shape_of(normaliser.strict(turns(shape), caps))
    assert [f"{role} {text}" for role, text in made] == expected


@pytest.mark.parametrize(
    ("shape", "caps", "expected"),
    [
        ("u1 c12 t1 t2 a1", FREE, "u1 c12 t1 t2 a1"),
        ("u1 c12 t2 t1 a1", replace(FREE, parallel_calls=False), "u1 c1 t1 c2 t2 a1"),
        ("u1 c12 t1 t3", replace(FREE, parallel_calls=False), "u1 c1 t1 c2 t3"),
    ],
)
def test_calls_are_fitted(shape: str, caps: TemplateCaps, expected: str) -> None:
    assert normaliser.fit_calls(turns(shape), caps) == turns(expected)


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_text"),
    [
        ('{"a": 1}', {"a": 1}, '{"a": 1}'),
        ("", {}, "{}"),
        ("null", {}, "{}"),
        ("{", "{", "{"),
        ("[]", "[]", "[]"),
        ("not JSON", "not JSON", "not JSON"),
        ('"text"', '"text"', '"text"'),
        ("[" * 100_000, "[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_history(arguments: str, as_object: object, as_text: str) -> None:
    turn = Turn("assistant", (), calls=(PastCall("f", arguments, "c"),))

    def rendered(caps: TemplateCaps) -> Any:
        (message,) = normaliser.as_messages([turn], caps)
        return message["tool_calls"][0]["function"]["arguments"]

    assert rendered(FREE) == as_object
    assert rendered(replace(FREE, object_arguments=False)) == as_text
    needs_objects = rendered(replace(FREE, text_arguments=False))
    assert needs_objects == (as_object if isinstance(as_object, dict) else {"arguments": arguments})


def test_content_in_the_form_that_a_template_reads() -> None:
    typed = replace(FREE, string_content=False, typed_content=True)
    (message,) = normaliser.as_messages([Turn("user", ("a", "b"))], typed)
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert message == {"role": "user", "content": parts}
    (message,) = normaliser.as_messages([Turn("assistant", (), "Hm.")], FREE)
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


def test_a_billing_header_is_no_part_of_a_prompt() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"
    system = Turn("system", (header.format("4f1"), "You are an agent.", "x-other: 1"))
    (changed,) = normaliser.complete([system])
    assert changed.text == "You are an agent.\nx-other: 1"
    user = Turn("user", (header,))
    assert normaliser.complete([user]) == [user]


def test_results_find_their_calls() -> None:
    conversation = [
        Turn("assistant", (), calls=(PastCall("f"), PastCall("g", call_id="g1"))),
        Turn("tool", ("of g",), name="g"),
        Turn("tool", ("of f",)),
        Turn("tool", ("of nothing",), call_id="z"),
        Turn("tool", ("late",)),
    ]
    calling, *results = normaliser.complete(conversation)
    assert [call.call_id for call in calling.calls] == ["call_0_0", "g1"]
    assert [(result.call_id, result.name) for result in results] == [
        ("g1", "g"),
        ("call_0_0", "f"),
        ("z", ""),
        ("call_4", ""),
    ]


TYPED = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p['type'] == 'text' %}"
    "{{ p['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
)
ALL = "{% for m in messages %}[{{ m.role[0] }} {{ m.content }}]{% endfor %}"
FIRST_SYSTEM_ONLY = (
    """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"""
    + ALL
)
HOISTS_SYSTEM = """{% for m in messages if m.role == 'system' %}[s {{ m.content }}]{% endfor %}
{%- for m in messages if m.role != 'system' %}[{{ m.role[0] }} {{ m.content }}]{% endfor %}"""
NO_EMPTY_ANSWERS = (
    """{% for m in messages %}{% if m.role == 'assistant' and not m.content
and not m.tool_calls %}{{ raise_exception('No.') }}{% endif %}{% endfor %}"""
    + ALL
)
LAST_ONLY = "{{ messages[-1].content }}"


def written(source: str, conversation: list[Turn]) -> str:
    template = ChatTemplate(source, bos="", eos="")
    return str(normaliser.render(template, conversation, (), {}))


def test_content_is_in_parts_where_a_template_wants_them() -> None:
    assert ChatTemplate(TYPED, bos="", eos="").caps.content("a") == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("source", "shape", "expected"),
    [
        (ALL, "s1 s2 u1 a1 s3 u2 u3", "[s s1][s s2][u u1][a a1][s s3][u u2][u u3]"),
        (FIRST_SYSTEM_ONLY, "s1 u1 u2", "[s s1][u u1][u u2]"),
        (FIRST_SYSTEM_ONLY, "s1 s2 u1", "[s s1\n\ns2][u u1]"),
        (HOISTS_SYSTEM, "s1 s2 u1", "[s s1][s s2][u u1]"),
        (HOISTS_SYSTEM, "u1 a1 s1 u2", f"[u u1][a a1][u {late('s1')}\n\nu2]"),
    ],
)
def test_what_a_template_takes_is_found_by_trying(source: str, shape: str, expected: str) -> None:
    assert written(source, turns(shape)) == expected


def test_a_users_text_never_vanishes_silently() -> None:
    with pytest.raises(InvalidRequestError, match="leaves out a message: 'u1'"):
        written(LAST_ONLY, turns("u1 a1 u2"))


def test_an_empty_answer_is_a_blank_where_it_must_be_something() -> None:
    conversation = [Turn("user", ("u1",)), Turn("assistant"), Turn("user", ("u2",))]
    assert written(ALL, conversation) == "[u u1][a ][u u2]"
    assert written(NO_EMPTY_ANSWERS, conversation) == "[u u1][a  ][u u2]"


SHAPES = [
    "u1",
    "s1",
    "s1 s2 u1",
    "s1 u1 a1 s2 u2",
    "u1 s1",
    "a1 u1 a2 u2",
    "u1 u2 a1 a2 u3 u4",
    "s1 a1 a2 u1",
    "u1 a1",
]
WITH_CALLS = ["u1 c1 t1", "u1 c1 t1 u2", "s1 u1 c12 t1 t2 u2 u3", "u1 c1 s1 t1 a1 u2", "u1 c1 u2"]


@every_template
@pytest.mark.parametrize("shape", [*SHAPES, *WITH_CALLS])
def test_real_templates_take_every_shape(path: Path, shape: str) -> None:
    """Each text of a user and of the system is in the prompt, and the user's in their order."""
    tools: list[Any] = TOOLS if shape in WITH_CALLS else []
    conversation = normaliser.complete(turns(shape))
    prompt = normaliser.render(template_at(path), conversation, tools, {})
    assert all(turn.text in prompt for turn in turns(shape) if turn.role == "system")
    places = [prompt.rindex(turn.text) for turn in turns(shape) if turn.role == "user"]
    assert places == sorted(places)


@every_template
@pytest.mark.parametrize("arguments", ["{", "[]", "null", "", '"a"', '{"a": null}', "plain"])
def test_real_templates_take_any_arguments(path: Path, arguments: str) -> None:
    call = PastCall("now", arguments, "abcdefghi")
    conversation = [
        Turn("user", ("Hi",)),
        Turn("assistant", (), calls=(call,)),
        Turn("tool", ("noon",), call_id="abcdefghi", name="now"),
        Turn("user", ("Bye",)),
    ]
    assert "Bye" in normaliser.render(template_at(path), conversation, TOOLS, {})


@every_template
@pytest.mark.parametrize("text", ["There is", " There is\n", "Hi"])
def test_real_templates_write_an_answer_that_is_begun(path: Path, text: str) -> None:
    """It is the end of the prompt, with its blanks or without those at its ends."""
    begun = Turn("assistant", (text,))
    before, answer = normaliser.render_begun(template_at(path), turns("s1 u1"), begun, (), {})
    assert answer in (text, text.rstrip(), text.strip())
    assert "u1" in before
    assert "CONTINUE" not in before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("command-r7b", "<|CHATBOT_TOKEN|><|START_RESPONSE|>"),
        ("glm-4.7-flash", "<|assistant|></think>"),
        ("kimi-k3", "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>"),
        ("solar", "<|begin|>assistant<|content|>"),
        ("recipients", "<assistant>>>>all\n"),
    ],
)
def test_an_answer_that_is_begun_is_where_the_template_has_answers(
    name: str, expected: str
) -> None:
    (path,) = (one for one in TEMPLATES if name in (one.stem, one.parent.name))
    begun = Turn("assistant", ("There is",))
    before, answer = normaliser.render_begun(template_at(path), turns("u1"), begun, (), {})
    assert before.endswith(expected)
    assert answer == "There is"


def test_an_answer_that_a_template_does_not_write_is_behind_its_prompt() -> None:
    source = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}|"
    template = ChatTemplate(source, bos="", eos="")
    begun = Turn("assistant", ("There", "is"))
    assert normaliser.render_begun(template, turns("u1"), begun, (), {}) == ("u1|", "There\n\nis")


JOINS = """{% for m in messages %}[{{ m.role[0] }} {% if m.content is string %}{{ m.content }}
{%- else %}{% for p in m.content %}{{ p.text }}{% if not loop.last %}+{% endif %}{% endfor %}
{%- endif %}]{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (JOINS, "[u a+b]"),
        (TYPED, "user:ab"),
        (ALL, "[u a\nb]"),
        (JOINS.replace("is string", "is string or m.role == 'user'"), "[u a+b]"),
    ],
)
def test_texts_are_joined_as_the_template_joins_them(source: str, expected: str) -> None:
    """Where it cannot join those of a role, by what it has between others."""
    assert written(source, [Turn("user", ("a", "b"))]) == expected


def test_reasoning_is_a_part_of_the_content_where_it_is_nothing_else() -> None:
    source = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{{ '(' + p.thinking + ')' if p.type == 'thinking' else p.text }}{% endfor %}
{%- endif %}|{% endfor %}"""
    conversation = [Turn("user", ("a",)), Turn("assistant", ("b",), "Hm."), Turn("user", ("c",))]
    assert written(source, conversation) == "a|(Hm.)b|c|"
    by_name = source.replace("{% if m.content is", "{{ m.thinking }}{% if m.content is")
    assert written(by_name, conversation) == "a|Hm.b|c|"


TAGGED = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Snow."
)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (Turn("assistant", (TAGGED,)), "<|channel|>final<|message|>Snow.<|end|>"),
        (
            Turn(
                "assistant",
                (TAGGED.partition("<|start|>")[0],),
                calls=(PastCall("now", "{}", "c"),),
            ),
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now",
        ),
        (
            Turn("assistant", (), TAGGED, calls=(PastCall("now", "{}", "c"),)),
            "<|channel|>analysis<|message|>Hm.Snow.<|end|><|start|>assistant to=functions.now",
        ),
        (Turn("user", (TAGGED,)), f"<|message|>{TAGGED}<|end|>"),
        (Turn("assistant", ("<|cha<|channel|>nnel|>final<|message|>",)), "final<|message|>"),
    ],
)
def test_gpt_oss_takes_its_own_tags_in_history(turn: Turn, expected: str) -> None:
    (path,) = (one for one in TEMPLATES if one.stem == "gpt-oss")
    conversation = [Turn("user", ("u1",)), turn, *turns("u2" if not turn.calls else "tc u2")]
    assert expected in normaliser.render(template_at(path), conversation, TOOLS, {})


def test_tools_without_descriptions_are_taken_by_templates_that_want_some() -> None:
    source = (
        '{# <tool_call>\\n{"name #}'  # asks for a format
        "{% for t in tools or [] %}{% for n, p in t.function.parameters.properties.items() %}"
        "{{ n + ': ' + p.description }}{% endfor %}{% endfor %}" + ALL
    )
    template = ChatTemplate(source, bos="", eos="")
    assert normaliser.render(template, turns("u1"), TOOLS[:1], {}) == "city: days: [u u1]"
