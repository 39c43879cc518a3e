"""The tokens of chats, with vocabularies of several kinds."""

from __future__ import annotations

from pathlib import Path

import gguf
import llama_cpp
import pytest

from serve_app.kernels.llama.model import Model
from serve_app.prompt.conversation import Attachment, PastCall, Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.unit.prompt.tool_calls.formats import TEMPLATES, TOOLS

TEMPLATE = "{{ bos_token }}{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
HI = [Turn("user", ("Hi",))]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of SentencePiece's kind, of bytes and some letters, that wants BOS and EOS."""
    path = tmp_path_factory.mktemp("vocabulary") / "sentencepiece.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abHi:<>/s",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.usefixtures("vocabularies_alone")
def test_sentencepiece_keeps_a_users_spaces(sentencepiece: Path) -> None:
    tokenizer = Tokenizer(sentencepiece, TEMPLATE)
    tokens = tokenizer.encode_chat([Turn("user", ("a<s>b",)), Turn("user", ("a </s>b",))])
    assert tokens.count(1) == 3
    assert tokens.count(2) == 2
    text = tokenizer.decode(tokens, special=True)
    assert text == "<s><s> user: a<s>b</s><s> user: a </s>b</s>"


@pytest.mark.usefixtures("vocabularies_alone")
def test_texts_without_control_tokens_are_tokenized_as_a_whole(sentencepiece: Path) -> None:
    for path in (sentencepiece, BUILTIN_MODEL):
        tokenizer = Tokenizer(path, TEMPLATE)
        begun = Turn("assistant", (" It",))
        text = str(tokenizer.render_chat(HI, begun=begun))
        whole = tokenizer.model.tokenize(text, add_special=False, parse_special=True)
        assert tokenizer.encode_chat(HI, begun=begun) == tuple(whole)


@pytest.mark.usefixtures("vocabularies_alone")
def test_a_wish_for_eos_does_not_end_a_prompt(sentencepiece: Path) -> None:
    tokenizer = Tokenizer(sentencepiece, "{{ messages[0].content }}")
    assert tokenizer.encode("Hi")[0] == tokenizer.encode_chat(HI)[0] == 1
    assert 2 not in tokenizer.encode("Hi")
    assert 2 not in tokenizer.encode_chat(HI)
    assert tokenizer.encode_for_embedding("Hi")[-1] == 2


def test_attachments_have_places() -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, "{% for m in messages %}{{ m.content }}|{% endfor %}")
    conversation = [
        Turn("user", ("a", Attachment("x"), "b", Attachment("y"))),
        Turn("user", ("c",)),
    ]
    tokens = tokenizer.encode_chat(conversation)
    assert [token for token in tokens if token < 0] == [-1, -2]
    assert tokenizer.decode(tokens) == "ab|c|"


def test_the_files_template_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(path for path in TEMPLATES if path.stem == "qwen3").read_text()
    monkeypatch.setattr(Model, "tool_chat_template", source)
    monkeypatch.setattr(Model, "chat_template", "plain {{ messages[0].content }}")
    tokenizer = Tokenizer(BUILTIN_MODEL)
    assert tokenizer.render_chat(HI) == "plain Hi"
    assert "get_weather" in tokenizer.render_chat(HI, TOOLS)
    called = [*HI, Turn("assistant", (), calls=(PastCall("f"),)), Turn("tool", ("r",))]
    assert not tokenizer.render_chat(called).startswith("plain")
    assert tokenizer.tool_format.name == "hermes"
    own = Tokenizer(BUILTIN_MODEL, "chosen {{ messages[0].content }}")
    assert own.render_chat(HI, TOOLS).startswith("chosen")


def test_no_text_is_too_long_to_tokenize() -> None:
    model = Model(BUILTIN_MODEL, vocab_only=True)
    assert model.vocab_type == llama_cpp.LLAMA_VOCAB_TYPE_BPE
    for text in ("字" * 300_000, " " * 300_000, "ก้" * 150_000):
        assert (
            model.detokenize(model.tokenize(text, add_special=False, parse_special=False)) == text
        )
