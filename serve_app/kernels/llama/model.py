"""A GGUF file opened by llama.cpp: its metadata, its tokenizer and, unless `vocab_only`, its weights."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import llama_cpp
from llguidance import LLMatcher, LLTokenizer

from serve_app.base import heap
from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.base.formats import EmbeddingPooling, LoadMode
from serve_app.base.sampling import SamplingParams, Triggers
from serve_app.base.sharing import turns
from serve_app.config import shards
from serve_app.kernels.llama import library, long_runs
from serve_app.kernels.llama.cache_sizes import CacheSizes, cache_sizes
from serve_app.kernels.llama.grammars.constraint import LIMITS, Constraint, LazyConstraint
from serve_app.kernels.llama.grammars.grammar_tokenizer import grammar_tokenizer, is_delimiter
from serve_app.kernels.llama.sampling.history import Histories, History
from serve_app.kernels.llama.shared import Shared
from serve_app.kernels.llama.stored_weights import StoredWeights

_CONTROL_KINDS = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_KINDS_FOUND_BY_TEXT = _CONTROL_KINDS | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_LOAD_MODES: dict[LoadMode, int] = {
    "auto": llama_cpp.LLAMA_LOAD_MODE_AUTO,
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "mlock": llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    "mmap+mlock": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    "none": llama_cpp.LLAMA_LOAD_MODE_NONE,
}

_POOLINGS: dict[int, EmbeddingPooling | Literal["rank"]] = {
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_CLS: "cls",
    llama_cpp.LLAMA_POOLING_TYPE_LAST: "last",
    llama_cpp.LLAMA_POOLING_TYPE_RANK: "rank",
}

# Architectures whose recurrent layers llama.cpp rolls back by a few tokens: at no price, or slowly.
# The slow ones have all past states written after each batch (0.8B shape, Q4_K_M, 16 rows: 3 states take
# 8% longer, 15 a third).
# Source: llama.cpp, `llm_arch_supports_rs_rollback`.
_ROLLED_BACK = frozenset({"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"})
_ROLLED_BACK_SLOWLY = frozenset(
    {"bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "qwen35", "qwen35moe", "qwen4exp"}
)
# Kinds of rotary positions with a row and a column (M-RoPE).
_SEVERAL_DIMENSIONS = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
# More than names of metadata have.
_NAME_BYTES = 256
# Characters of the grammars that are kept. Compiled, they take four hundred times as much.
_KEPT_GRAMMARS = 2**14

# Architectures of drafts that read another model's hidden states.
_HEADS = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash draft"}

_is_eog = library.brief(llama_cpp.llama_vocab_is_eog)

# What `Model.fingerprint` reads of a file: its ends, and blocks in between.
_END_BYTES = 2**20
_N_BLOCKS = 64
_BLOCK_BYTES = 4096


def _progress(on_loaded: Callable[[float], None]) -> Any:
    """The callback of a load, which lets others that share its cores compute between two weights."""

    def on_part(part: float, _user_data: int | None) -> bool:
        turns.current().take()
        on_loaded(part)
        return True  # go on

    return llama_cpp.llama_progress_callback(on_part)


def _reason(lines: Sequence[str]) -> str:
    """Why a file cannot be loaded, in llama.cpp's own words, which are in its log lines only."""
    errors = [line.partition("error loading model: ")[2] for line in lines]
    of_file = [line.partition(": ")[2] for line in lines if line.startswith("gguf_init")]
    reasons = [error for error in errors if error and "failed to load model from" not in error]
    reason = next(iter(reasons + of_file), "no reason is known")
    if "CLIP cannot be used" in reason:
        return "it is a projector. Name it in `projector`, and the model itself in `source`"
    return reason.rstrip(".")


def _token(token: int) -> int | None:
    return None if token < 0 else int(token)


class Model:
    """An open model. Immutable but for `stored`: any thread may call. Freed when nobody holds it any more.

    `vocab_only` reads the metadata and the vocabulary and leaves the weights on disk, where a hole may
    be in their place. This takes tenths of seconds and megabytes, and is enough to tokenize and to tell
    sizes. `delimiters` tells which texts structure the answers that a chat template asks for: where
    such a text is a control token, it is shown. Raises ConfigError when the file is missing, llama.cpp
    cannot load it, or the model has an encoder besides its decoder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_only: bool = False,
        load_mode: LoadMode = "auto",
        repack: bool = True,
        delimiters: Callable[[str], Iterable[str]] = lambda _: (),
        on_loaded: Callable[[float], None] = lambda _: None,
        own_layers: bool = False,
    ) -> None:
        """`on_loaded` is told, while the weights are loaded, which part of them is. `repack` lays them out
        anew for kernels of few rows. `own_layers` loads the model's own prediction layers, too."""
        library.init()
        self.path = Path(path)
        try:
            with self.path.open("rb"):
                pass
        except FileNotFoundError:
            raise ConfigError(f"There is no model file at {self.path}.") from None
        except OSError as error:
            raise ConfigError(
                f"The model file {self.path} cannot be read: {error.strerror}."
            ) from None
        params = llama_cpp.llama_model_default_params()
        params.no_alloc = vocab_only
        params.n_gpu_layers = 0
        params.load_mode = _LOAD_MODES["none" if vocab_only else load_mode]
        params.use_extra_bufts = repack
        params.load_mtp = own_layers
        if not vocab_only:
            params.progress_callback = _progress(on_loaded)  # ctypes keeps it as long as `params`
        turn = nullcontext() if vocab_only else turns.current().turn()
        with library.capture_log() as lines, turn:
            pointer = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
        if not pointer:
            raise ConfigError(
                f"llama.cpp of llama-cpp-python {library.version()} cannot load {self.path}: "
                f"{_reason(lines)}."
            )
        self.pointer = pointer
        self.stored: StoredWeights | None = None
        """The weights as the file has them, once a context computes batches of many rows over them."""
        # Not at exit: a decoder thread may still be running then.
        weakref.finalize(self, llama_cpp.llama_model_free, pointer).atexit = False
        self.architecture = self.meta("general.architecture") or ""
        if kind := _HEADS.get(self.architecture):
            raise ConfigError(
                f"{self.path} is {kind}, which Corral does not support. A draft is a smaller model of the "
                "same family, or the model's own prediction layers."
            )
        if llama_cpp.llama_model_has_encoder(pointer):
            # T5's decoder sees no prompt itself.
            raise ConfigError(
                f"{self.path} is of the architecture {self.architecture}, with an encoder "
                "for prompts: Corral serves models that are a decoder alone, or BERT's kind for embeddings."
            )
        self._vocab = llama_cpp.llama_model_get_vocab(pointer)
        if not self._vocab:
            raise ConfigError(f"{self.path} holds no vocabulary.")
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._compiled = Shared[str, Constraint](_KEPT_GRAMMARS, len)
        self._histories = Histories(self._vocab, self.n_vocab, self._all_pieces)
        self._read_metadata()
        self._read_vocabulary()
        self._shown = self._shown_by(delimiters)

    # -- metadata ---------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """The metadata value at `key` as text, or None. Arrays are not returned."""
        size = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        name = ctypes.create_string_buffer(_NAME_BYTES)
        for i in range(llama_cpp.llama_model_meta_count(self.pointer)):
            llama_cpp.llama_model_meta_key_by_index(self.pointer, i, name, len(name))
            key = name.value.decode(errors="replace")
            value = self.meta(key)
            if value is not None:
                found[key] = value
        return found

    def most_tokens(self, n_ctx_slot: int) -> int:
        """The tokens that a request or a text may have, where so many are configured. An encoder's
        positions may be a table, which has no more than those that it was trained for."""
        return n_ctx_slot if self.is_causal else min(n_ctx_slot, self.n_ctx_train)

    def meta_int(self, key: str, default: int) -> int:
        """The metadata value at `{architecture}.key` as an integer, or the default."""
        value = self.meta(f"{self.architecture}.{key}")
        return default if value is None else int(value)

    def _read_metadata(self) -> None:
        self.n_bytes = int(llama_cpp.llama_model_size(self.pointer))
        """Bytes of its weights."""
        self.n_params = int(llama_cpp.llama_model_n_params(self.pointer))
        self.n_ctx_train = self.meta_int("context_length", 2048)
        """The context length that the model was trained for, in tokens."""
        width = self.meta_int("embedding_length", 0)
        self.n_embd = self.meta_int("embedding_length_out", width)
        self.pooling: EmbeddingPooling | None = _POOLINGS.get(
            self.meta_int("pooling_type", llama_cpp.LLAMA_POOLING_TYPE_NONE)
        )
        """How the file says that a text's vectors become one, or a score; None if it does not say."""
        self.is_causal = self.meta(f"{self.architecture}.attention.causal") != "false"
        """Whether tokens see only those before them; a model where they see all makes embeddings only."""
        self.n_own_layers = self.meta_int("nextn_predict_layers", 0)
        """The number of own prediction layers (MTP), which guess further tokens by hidden states."""
        self.n_layer = self.meta_int("block_count", 1) - self.n_own_layers
        """The number of layers, without the model's own prediction layers."""
        n_head = self.meta_int("attention.head_count", 1)
        head = max(1, width) // max(1, n_head)
        self.head_sizes = (
            self.meta_int("attention.key_length", head),
            self.meta_int("attention.value_length", head),
        )
        """Elements of one head's key and value."""
        self._n_head_kv = self.meta_int("attention.head_count_kv", n_head)
        self.window = int(llama_cpp.llama_model_n_swa(self.pointer))
        """Tokens that sliding-window layers look back on; 0 if there are none."""
        kind = llama_cpp.llama_model_rope_type(self.pointer)
        self.n_dimensions = 4 if kind in _SEVERAL_DIMENSIONS else 1
        """The dimensions of a token's position: four with M-RoPE, otherwise one. Source: llama.cpp,
        `llama_hparams::n_pos_per_embd`."""
        self.is_recurrent = bool(
            llama_cpp.llama_model_is_hybrid(self.pointer)
            or llama_cpp.llama_model_is_recurrent(self.pointer)
        )
        """Whether layers keep one state of a sequence, and not all of its tokens."""
        self.rolls_back_freely = self.architecture in _ROLLED_BACK
        """Whether past states of its recurrent layers cost memory only."""
        self.can_roll_back = self.rolls_back_freely or self.architecture in _ROLLED_BACK_SLOWLY
        """Whether its recurrent layers can keep past states, so that a few tokens can be dropped."""

    def _read_vocabulary(self) -> None:
        self.vocab_type = int(llama_cpp.llama_vocab_type(self._vocab))
        self.bos = _token(llama_cpp.llama_vocab_bos(self._vocab))
        """The token that begins a text, if the vocabulary has one."""
        self.eos = _token(llama_cpp.llama_vocab_eos(self._vocab))
        """The token that ends a text, if the vocabulary has one."""

    @property
    def vocabulary(self) -> Any:
        return self._vocab

    def pooling_with(self, configured: EmbeddingPooling | None) -> EmbeddingPooling:
        """The pooling that a configuration asks for; reranking models have no other than theirs."""
        return "rank" if self.pooling == "rank" else configured or self.pooling or "mean"

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier's outputs; empty for a single output without a label."""
        n_outputs = llama_cpp.llama_model_n_cls_out(self.pointer)
        labels = (llama_cpp.llama_model_cls_label(self.pointer, i) for i in range(n_outputs))
        return tuple(label.decode(errors="replace") for label in labels if label is not None)

    @property
    def has_softmax(self) -> bool:
        """Whether the outputs of its classifier are probabilities. Source: llama.cpp, `build_pooling`."""
        return self.architecture in ("qwen3", "qwen3vl")

    @property
    def layer_elements(self) -> tuple[int, int]:
        """Elements of the key and the value that one token has in a layer, where all layers are alike."""
        key, value = self.head_sizes
        return self._n_head_kv * key, self._n_head_kv * value

    @functools.cached_property
    def cache_sizes(self) -> CacheSizes | None:
        """The cache that the model needs, by llama.cpp; None if it does not tell. With `vocab_only`."""
        return cache_sizes(self.pointer)

    @property
    def file_type(self) -> str:
        """How most of its numbers are stored, in llama.cpp's words: `Q4_K - Medium`."""
        name = llama_cpp.llama_ftype_name(llama_cpp.llama_model_ftype(self.pointer))
        return (name or b"").decode()

    def fingerprint(self) -> bytes:
        """32 bytes that tell this file's content from other models', wherever it lies.

        Of the size, both ends and evenly spaced blocks, 2.25 MiB in all. To read a file of many GB
        would take minutes at every start. The beginning is the metadata, and other weights differ
        nearly everywhere; a change that leaves the size and all that is read is not noticed. The same
        is read of each file of a model in shards. Raises OSError when a file is gone.
        """
        return fingerprint_of(self.files)

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        return files_of(self.path)

    def window_start(self, position: int) -> int:
        """The first position that a token at that one sees in layers with a window. Llama 4's do not slide:
        they see their part of the context only."""
        if self.architecture == "llama4":
            return position // self.window * self.window
        return max(0, position - self.window + 1)

    @property
    def chat_template(self) -> str | None:
        return self.meta("tokenizer.chat_template")

    @property
    def tool_chat_template(self) -> str | None:
        """The template for chats with tools, if the model has one of its own for these."""
        return self.meta("tokenizer.chat_template.tool_use")

    # -- vocabulary -------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS/EOS if the model wants them; `parse_special` lets the text of control
        tokens stand for the tokens. Runs without the GIL.
        """
        if len(text) > long_runs.LONGEST and self.vocab_type == llama_cpp.LLAMA_VOCAB_TYPE_BPE:
            pieces = long_runs.split_runs(text, self._text_pattern)
            if len(pieces) > 1:
                return self._tokenize_pieces(pieces, add_special, parse_special)
        data = text.encode()
        capacity = len(data) + 2
        while True:
            tokens = (llama_cpp.llama_token * capacity)()
            n = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), tokens, capacity, add_special, parse_special
            )
            if n >= 0:
                return tokens[:n]
            capacity = -n

    def _tokenize_pieces(
        self, pieces: Iterable[str], add_special: bool, parse_special: bool
    ) -> list[int]:
        tokens = [
            token
            for piece in pieces
            for token in self.tokenize(piece, add_special=False, parse_special=parse_special)
        ]
        if add_special and llama_cpp.llama_vocab_get_add_eos(self._vocab) and self.eos is not None:
            tokens.append(self.eos)
        return [*self.first_tokens, *tokens] if add_special else tokens

    @functools.cached_property
    def _text_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._texts_of(_KINDS_FOUND_BY_TEXT), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, not always whole characters. Control tokens are empty unless
        `special`, but for those of the model's `delimiters` that the chat template uses. Cached."""
        key = (token, special or token in self._shown)
        if key not in self._pieces:
            self._pieces[key] = self._read_piece(*key)
        return self._pieces[key]

    def _read_piece(self, token: int, special: bool) -> bytes:
        size = 32
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def text_of(self, token: int) -> str:
        """A token as the vocabulary has it."""
        text = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return str(text.decode(errors="replace"))

    @functools.cached_property
    def longest_text(self) -> int:
        """No token stands for more bytes than this."""
        texts = (
            llama_cpp.llama_vocab_get_text(self._vocab, token) for token in range(self.n_vocab)
        )
        return max(map(len, texts), default=1) or 1

    @functools.cached_property
    def vocabulary_key(self) -> bytes:
        """16 bytes that tell this vocabulary from others: where they are the same, so are all tokens' texts
        and kinds, and the ends of texts. Takes some tenths of a second for a large one."""
        digest = blake2b(f"{self.bos} {self.eos}".encode(), digest_size=16)
        for token in range(self.n_vocab):
            text = llama_cpp.llama_vocab_get_text(self._vocab, token)
            kind = int(llama_cpp.llama_vocab_get_attr(self._vocab, token))
            digest.update(b"%d %d " % (kind, len(text)) + text)
        return digest.digest()

    @functools.cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts of control tokens that are recognised in texts."""
        return self._texts_of(_CONTROL_KINDS)

    def _texts_of(self, kinds: int) -> tuple[str, ...]:
        tokens = (
            token
            for token in range(self.n_vocab)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & kinds
        )
        texts = (self.detokenize([token], special=True) for token in tokens)
        return tuple(text for text in texts if text)

    @functools.cached_property
    def first_tokens(self) -> tuple[int, ...]:
        """The token that begins each text, if the model wants one."""
        begins = self.bos is not None and llama_cpp.llama_vocab_get_add_bos(self._vocab)
        return (self.bos,) if begins and self.bos is not None else ()

    def trimmed_beside(self, before: str, text: str, after: str) -> str:
        """The text without the blanks that the control tokens beside it take, as llama.cpp cuts them;
        empty texts stand for no token."""
        if before and self._takes_blanks(before, llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP):
            text = text.lstrip()
        if after and self._takes_blanks(after, llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP):
            text = text.rstrip()
        return text

    def _takes_blanks(self, control: str, side: int) -> bool:
        (token,) = self.tokenize(control, add_special=False, parse_special=True)
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token) & side)

    def _shown_by(self, delimiters: Callable[[str], Iterable[str]]) -> frozenset[int]:
        templates = filter(None, (self.chat_template, self.tool_chat_template))
        texts = {text for template in templates for text in delimiters(template)}
        tokens = (self.delimiter_token(text) for text in texts)
        return frozenset(token for token in tokens if token is not None)

    def delimiter_token(self, text: str) -> int | None:
        """The one token that stands for the text, and not its characters, as grammars distinguish."""
        tokens = self.tokenize(text, add_special=False, parse_special=True)
        if len(tokens) != 1:
            return None
        found = llama_cpp.llama_vocab_get_attr(self._vocab, tokens[0])
        return tokens[0] if is_delimiter(found, text.encode()) else None

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(t, special=special) for t in tokens).decode(errors="replace")

    def constraint(self, grammar: str, triggers: Triggers | None = None) -> Constraint:
        """A constraint that keeps one sequence to a grammar, as llguidance serialises it; with `triggers`,
        from there. The first takes a second for a large vocabulary, a new grammar milliseconds, without the
        GIL. Raises InvalidRequestError if the grammar is none, or takes too much."""
        fresh = self._compiled.get(grammar, lambda: self._compile(grammar)).fresh()
        if triggers is None:
            return fresh
        return LazyConstraint(
            fresh,
            triggers,
            functools.partial(self.piece, special=True),
            functools.partial(self.tokenize, add_special=False, parse_special=False),
        )

    def _compile(self, grammar: str) -> Constraint:
        made = Constraint(LLMatcher(self._trie, grammar, log_level=0, limits=LIMITS), self.n_vocab)
        for probe in (made.fresh(), made.fresh()):
            probe.token_mask()  # expressions that blow up do so at the first token, or when they are copied
            if probe.fault is not None:
                raise InvalidRequestError(f"The grammar takes too much: {probe.fault}")
        if len(grammar) > _KEPT_GRAMMARS:
            weakref.finalize(made, heap.trim_soon)
        return made

    def history(
        self, params: SamplingParams, n_ctx_slot: int, prompt: Sequence[int]
    ) -> History | None:
        """The samplers that look at last tokens, told of this prompt; see `Histories.history`."""
        return self._histories.history(params, n_ctx_slot, prompt)

    def _all_pieces(self) -> list[bytes]:
        return [self._read_piece(token, True) for token in range(self.n_vocab)]

    @functools.cached_property
    def _trie(self) -> LLTokenizer:
        return grammar_tokenizer(self._vocab, self.n_vocab, self.eog_tokens)

    @property
    def rerank_template(self) -> str | None:
        """The template of a reranking model, with `{query}` and `{document}` in it, if the file has one."""
        return self.meta("tokenizer.chat_template.rerank")

    def encode_pair(self, query: Sequence[int], document: Sequence[int]) -> list[int]:
        """The tokens for a reranking model without a template: BOS query EOS SEP document EOS, as
        far as the vocabulary wants those; llama-server's rules."""
        sep = llama_cpp.llama_vocab_sep(self._vocab)
        ends = [self.eos if self.eos is not None else sep]
        ends *= llama_cpp.llama_vocab_get_add_eos(self._vocab)
        begins = [self.bos] * llama_cpp.llama_vocab_get_add_bos(self._vocab)
        between = [*ends, *[sep] * llama_cpp.llama_vocab_get_add_sep(self._vocab)]
        return [t for t in (*begins, *query, *between, *document, *ends) if t is not None]

    def is_eog(self, token: int) -> bool:
        """Whether the token ends an answer (end of text, end of turn)."""
        return bool(_is_eog(self._vocab, token))

    @functools.cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        return tuple(token for token in range(self.n_vocab) if self.is_eog(token))

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """The tokens before a prefix, before a suffix and before the middle, if the vocabulary has them."""
        prefix = int(llama_cpp.llama_vocab_fim_pre(self._vocab))
        suffix = int(llama_cpp.llama_vocab_fim_suf(self._vocab))
        middle = int(llama_cpp.llama_vocab_fim_mid(self._vocab))
        return None if min(prefix, suffix, middle) < 0 else (prefix, suffix, middle)

    @property
    def repository_tokens(self) -> tuple[int | None, int | None]:
        """The tokens before a repository's name and before a file's; None for what it does not have."""
        return (
            _token(llama_cpp.llama_vocab_fim_rep(self._vocab)),
            _token(llama_cpp.llama_vocab_fim_sep(self._vocab)),
        )


def files_of(path: Path) -> tuple[Path, ...]:
    """The file, or all of a model in shards, of which it is the first. Raises ConfigError for another."""
    return tuple(path.with_name(name) for name in shards.names(path.name))


def fingerprint_of(files: Iterable[Path]) -> bytes:
    digest = blake2b(digest_size=32)
    for path in files:
        size = path.stat().st_size
        spans = [(0, _END_BYTES), (max(0, size - _END_BYTES), _END_BYTES)]
        spans += [(size * i // _N_BLOCKS, _BLOCK_BYTES) for i in range(_N_BLOCKS)]
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start, n_bytes in spans:
                file.seek(start)
                digest.update(file.read(n_bytes))
    return digest.digest()
