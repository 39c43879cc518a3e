"""The vocabulary of a tokenizer.json, as llama.cpp reads it from a GGUF file, and the proof of its tokens.

Source: llama.cpp's conversion of Hugging Face's models.
"""

# ruff: noqa: RUF001  # texts of all scripts are meant

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.openvino.exported.files import trusted

Json = Mapping[str, Any]

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_WORDS}\p{{N}}{_REST}"
LLAMA3 = rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"
"""The expressions that cut texts before tokens are looked up."""
_CUTS = {(QWEN2, False): "qwen2", (LLAMA3, True): "llama-bpe", (LLAMA3, False): "smaug-bpe"}
"""llama.cpp's names: by the expression, and whether a word that is a token is taken at once."""
_SPACE = "\u2581"
_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_UNKNOWN_PARTS = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
"""The parts of a tokenizer's model that llama.cpp has nothing like."""
_MOST_TOKENS = 2**20
_CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<pad>|<mask>")
"""Tokens that llama.cpp's conversion takes for control tokens, whatever the tokenizer says."""


@dataclass(frozen=True, slots=True)
class TokenizerVocabulary:
    """Tokens by id, and how texts become tokens."""

    kind: str
    """llama.cpp's name for the kind of tokenizer: `gpt2` for bytes, `llama` for SentencePiece's."""
    cut: str
    """llama.cpp's name for how texts are cut first."""
    tokens: Sequence[str]
    types: Sequence[TokenType]
    composes: bool = False
    """Whether the tokenizer composes characters first (NFC), which llama.cpp does not."""
    scores: Sequence[float] = ()
    """Scores of `llama` only: the higher, the earlier a token is put together."""
    adds_space: bool = False
    """Whether texts begin with a space, for `llama` only."""

    def add_to(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.cut)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)


@trusted("its tokenizer.json")
def read(tokenizer: Json, n_vocab: int) -> TokenizerVocabulary:
    """The vocabulary of a tokenizer.json, filled up to `n_vocab` tokens. Raises ConfigError, with the
    reason as the rest of a sentence, for a tokenizer that is not known."""
    if n_vocab > _MOST_TOKENS:
        raise ConfigError(f"its config.json says that it has {n_vocab} tokens")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        raise ConfigError(f"its tokenizer is of the kind {model.get('type')}")
    if parts := [name for name in _UNKNOWN_PARTS if model.get(name)]:
        raise ConfigError(f"its tokenizer has a {parts[0]}")
    tokens = _tokens(tokenizer, n_vocab)
    if model.get("byte_fallback"):
        return _of_characters(tokenizer, tokens)
    return _of_bytes(tokenizer, tokens)


def _of_bytes(tokenizer: Json, tokens: Sequence[str]) -> TokenizerVocabulary:
    normalizer = tokenizer.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise _unknown(normalizer)
    pattern = _pattern(tokenizer.get("pre_tokenizer") or {})
    cut = _CUTS.get((pattern, bool(tokenizer["model"].get("ignore_merges"))))
    if cut is None:
        raise ConfigError(f"its tokenizer cuts texts in a way that is not known: {pattern}")
    types = _types(tokenizer, tokens)
    return TokenizerVocabulary("gpt2", cut, tokens, types, composes=normalizer is not None)


def _pattern(pre_tokenizer: Json) -> str:
    match pre_tokenizer.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return str(pre_tokenizer.get("type"))


def _of_characters(tokenizer: Json, tokens: Sequence[str]) -> TokenizerVocabulary:
    """BPE over characters, with a token for each byte. llama.cpp knows it as SentencePiece's, where the
    scores of tokens stand for the order of merges."""
    steps = [*_steps(tokenizer, "normalizer"), *_steps(tokenizer, "pre_tokenizer")]
    for step in steps:
        if step["type"] not in ("Prepend", "Metaspace") and step != _UNDERLINE:
            raise _unknown(step)
    if lacking := sorted(_BYTES.difference(tokens)):  # which llama.cpp trusts to be there
        raise ConfigError(f"its tokenizer has no token {lacking[0]}")
    merges = [
        one.replace(" ", "") if isinstance(one, str) else "".join(one)
        for one in tokenizer["model"]["merges"]
    ]
    ranks = {token: rank for rank, token in reversed([*enumerate(merges)])}
    return TokenizerVocabulary(
        "llama",
        "default",
        tokens,
        _types(tokenizer, tokens),
        scores=[-float(ranks.get(token, len(merges))) for token in tokens],
        adds_space=any(
            step != _UNDERLINE and step.get("prepend_scheme") != "never" for step in steps
        ),
    )


def _steps(tokenizer: Json, name: str) -> list[Json]:
    part = tokenizer.get(name)
    if part is None:
        return []
    return list(part.get("normalizers") or part.get("pretokenizers") or [part])


def _unknown(step: object) -> ConfigError:
    return ConfigError(f"its tokenizer changes texts in a way that is not known: {step}")


def _tokens(tokenizer: Json, n_vocab: int) -> list[str]:
    """The names of tokens by id. Models have more places than tokens: these get names that no text has."""
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}
    if max(ids.values()) >= n_vocab:
        raise ConfigError(f"its tokenizer has more than {n_vocab} tokens, which config.json says")
    if min(ids.values()) < 0:
        raise ConfigError("its tokenizer has a token below 0")
    names = [_unused(place) for place in range(n_vocab)]
    for token, place in ids.items():
        names[place] = token
    if len({*names}) < n_vocab:  # llama.cpp aborts the process then
        raise ConfigError("two tokens of its tokenizer have one name")
    return names


def _unused(place: int) -> str:
    return f"[PAD{place}]"


def _types(tokenizer: Json, tokens: Sequence[str]) -> list[TokenType]:
    added = {one["content"]: one["special"] for one in tokenizer.get("added_tokens") or ()}
    unknown = tokenizer["model"].get("unk_token")
    is_of_characters = bool(tokenizer["model"].get("byte_fallback"))

    def type_of(place: int, token: str) -> TokenType:
        if is_of_characters and token == unknown:
            return TokenType.UNKNOWN
        if token in added:
            is_control = added[token] or _CONTROL.fullmatch(token) is not None
            return TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        if token == _unused(place):
            return TokenType.UNUSED
        if is_of_characters and token in _BYTES:
            return TokenType.BYTE
        return TokenType.NORMAL

    return [type_of(place, token) for place, token in enumerate(tokens)]


_TEXTS = (
    "",
    " ",
    "Hello, world! It's 3.14159 o'clock, and WE'LL see what they'd've done; I'm sure you're right.",
    "  two spaces,   three,\ttabs\t\tand\n\nlines\r\n   with spaces before\n \n  and after   \n\n\n",
    "def f(x: int) -> str:\n    return f'{x:>10_d}'  # 100% of `code`\n\tif a != b && c <= d {\n\t\t}\n",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 20, 300, 4000, 1234567890]}}',
    "Größe, Œuvre, señor, façade, İstanbul, naïve, coöperate, Ångström, Dvořák, ẞ",
    "Привет, мир! Как дела? Это проверка.",
    "Γειά σου Κόσμε, τι κάνεις;",
    "你好，世界！这是一个测试。12345年，价格是¥99.50。",
    "こんにちは、世界。これはテストです。カタカナも。",
    "안녕하세요, 세계! 테스트입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "🙂🚀 👩‍👩‍👧‍👦 🇩🇪 ✓ → ∑∫√π ≤ ½ ² ™ € “quotes” ‘single’ — dash… •",
    "a\u00a0b\u2003c\u3000d\u200be\x00f\x7fg",
    "https://www.example.com/path?query=1&other=%20#fragment user@example.org C:\\dir\\file.txt",
    "#!/bin/sh\nset -e\n# ---- ==== **** ____ ....\n<html><body class='x'>&amp;</body></html>\n",
)
_WORD = frozenset(string.printable)
_AT_ONCE = 24
_MOST_CHUNKS = 4000


def check_tokens(model: Model, tokenizer: Any, *, composes: bool) -> None:
    """Compare the tokens of many texts, with and without those that begin and end one. Raises ConfigError,
    with the reason as the rest of a sentence, at the first difference. `tokenizer` is the tokenizers
    package's; where it `composes`, only composed texts are compared."""
    texts = [*_TEXTS, *_of_tokens(model, tokenizer), *_with_added(tokenizer)]
    if composes:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for adds in (False, True):
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=adds)
        for text, expected in zip(texts, found, strict=True):
            tokens = model.tokenize(text, add_special=adds, parse_special=True)
            if tokens != expected.ids:
                raise ConfigError(
                    f"llama.cpp's tokens of {_begin(text)!r} are not its tokenizer's: {tokens[:16]} "
                    f"instead of {expected.ids[:16]}"
                )


def _begin(text: str) -> str:
    return text if len(text) < 60 else f"{text[:60]}..."


def _of_tokens(model: Model, tokenizer: Any) -> Iterator[str]:
    """Texts of many tokens in a row, so that merges of all kinds are made. ASCII only: of other characters,
    each program has a table of its own, of one year or another."""
    n_tokens = min(model.n_vocab, tokenizer.get_vocab_size())
    pieces = (model.piece(token) for token in range(n_tokens))
    words = [piece.decode() for piece in pieces if piece.isascii()]
    words = [word for word in words if word and _WORD.issuperset(word)]
    step = _AT_ONCE * max(1, len(words) // (_AT_ONCE * _MOST_CHUNKS))
    for at in range(0, len(words), step):
        yield "".join(words[at : at + _AT_ONCE])


def _with_added(tokenizer: Any) -> Iterator[str]:
    for token in tokenizer.get_added_tokens_decoder().values():
        yield f"{token.content}one{token.content} two\n{token.content}\n three {token.content}"
