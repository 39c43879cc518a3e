"""The built-in model's tokenizer: byte-level BPE, learned from the corpus.

The pre-tokenizer is Qwen2's, so that llama.cpp, which knows it as `qwen2`, cuts text the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from tools.chat_template import CONTROL_TOKENS

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))


def learn(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A tokenizer of `n_vocab` tokens for such texts; the control tokens come first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(_QWEN2), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_CONTROL.sub("\n", text) for text in texts), trainer)
    return tokenizer


def tokens_and_merges(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Of a saved tokenizer: its tokens by id, and its merges by rank."""
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in model["merges"]]
