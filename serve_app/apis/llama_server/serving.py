"""Turns sequences' deltas into llama-server's own answers.

Source: llama.cpp, tools/server/README.md, "POST /completion".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.apis.llama_server.preparation import PreparedLlamaCompletion
from serve_app.base.sampling import CHAIN, Api, SamplingParams
from serve_app.base.values.answers import FinishReason, PromptProgress, SequenceEnd, TokenDelta
from serve_app.config import sampling_fields
from serve_app.server.answering import logprobs
from serve_app.server.answering.answers import ProtocolAnswer
from serve_app.server.answering.timings import Running, prompt_progress, timings
from serve_app.server.model_registry import ServedModel

Json = dict[str, Any]


@dataclass
class LlamaChoice:
    index: int
    completion: PreparedLlamaCompletion
    model: ServedModel
    _text: list[str] = field(default_factory=list)
    _n_tokens: int = 0
    has_ended: bool = False
    _running: Running = field(default_factory=Running)

    def whole(self, delta: TokenDelta) -> Json:
        """The answer to a request without `stream`."""
        assert delta.end is not None
        self._text = [delta.text]
        tokens = list(delta.token_ids) if self.completion.return_tokens else []
        answer = self._final(delta.text, tokens, delta.end)
        if delta.logprobs:
            answer["completion_probabilities"] = self._probabilities(delta)
        return self._select_fields(answer)

    def events(self, delta: TokenDelta) -> list[Json]:
        """The events of a delta: how far its prompt is, its text, and at the end what the whole was."""
        self._running.saw(delta)
        tells_progress = self.completion.generation.return_progress
        events = [self._progress(one) for one in delta.progress] if tells_progress else []
        self._text.append(delta.text)
        self._n_tokens += len(delta.token_ids)
        if delta.logprobs:
            events += self._one_by_one(delta)
        elif delta.text or (delta.token_ids and delta.end is None):
            events.append(self._event(delta.text, delta.token_ids))
        if delta.end is not None:
            self.has_ended = True
            events.append(self._select_fields(self._final("", [], delta.end)))
        return events

    def silence(self) -> Json:
        """The event that goes where nothing comes for long."""
        return self._part("", ())

    def _progress(self, progress: PromptProgress) -> Json:
        fields = {"prompt_progress": prompt_progress(progress)}
        if self.completion.generation.timings_per_token:
            fields["timings"] = self._running.to_json(progress)
        return self._part("", ()) | fields

    def _event(self, content: str, tokens: Sequence[int]) -> Json:
        event = self._part(content, tokens)
        if self.completion.generation.timings_per_token:
            event["timings"] = self._running.to_json()
        return event

    def _part(self, content: str, tokens: Sequence[int]) -> Json:
        plan = self.completion.generation
        return {
            "index": self.index,
            "content": content,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._n_tokens,
            "tokens_evaluated": len(plan.prompts[self.index // plan.n]),
        }

    def _one_by_one(self, delta: TokenDelta) -> list[Json]:
        """An event for each token with its probability, as llama-server's clients expect it; the first one
        has the text of all that came together."""
        return [
            self._event("" if i else delta.text, [token]) | {"completion_probabilities": [found]}
            for i, (token, found) in enumerate(
                zip(delta.token_ids, self._probabilities(delta), strict=False)
            )
        ]

    def _final(self, content: str, tokens: list[int], end: SequenceEnd) -> Json:
        usage, plan = end.usage, self.completion.generation
        sampling, n_ctx = plan.sampling_of(self.index), self.model.n_ctx_slot
        eog = sorted(self.model.tokenizer.model.eog_tokens) if sampling.ignore_eos else ()
        return {
            "index": self.index,
            "content": content,
            "tokens": tokens,
            "id_slot": end.slot_id,
            "stop": True,
            "model": plan.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": generation_settings(
                sampling, n_ctx, plan.model, self.completion, eog
            ),
            "prompt": self.completion.prompt_texts[self.index // plan.n],
            "has_new_line": "\n" in "".join(self._text),
            "truncated": self._is_truncated(end),
            "stop_type": _stop_type(end),
            "stopping_word": end.stop or "",
            "tokens_cached": usage.cached_tokens,
            "timings": timings(end),
        }

    def _is_truncated(self, end: SequenceEnd) -> bool:
        used = end.usage.prompt_tokens + end.usage.completion_tokens
        return end.reason == FinishReason.LENGTH and used >= self.model.n_ctx_slot

    def _probabilities(self, delta: TokenDelta) -> list[Json]:
        tokens = zip(delta.token_ids, delta.logprobs, strict=False)
        piece, sampling = self.model.tokenizer.piece, self.completion.generation.sampling
        shares = sampling.post_sampling_probs
        return logprobs.entries(tokens, piece, shares=shares, with_ids=True)

    def _select_fields(self, answer: Json) -> Json:
        """The answer, or only its `response_fields`, if the request names some."""
        if self.completion.response_fields is None:
            return answer
        fields: Json = {}
        for path in self.completion.response_fields:
            value: Any = answer
            for one in path.split("/"):
                value = value.get(one, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                fields[path] = value
        return fields


_MISSING = object()
MOST_BIASES_TOLD = 1024
"""An answer does not repeat a logit bias of more tokens: to write a whole vocabulary holds up others."""


def _stop_type(end: SequenceEnd) -> str:
    if end.stop is not None:
        return "word"
    return "limit" if end.reason == FinishReason.LENGTH else "eos"


_OFF: Json = {
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "backend_sampling": False,
    "lora": [],
}
"""llama-server's values for settings that Corral does not have, when they are off."""


def generation_settings(
    sampling: SamplingParams,
    n_ctx_slot: int,
    model: str,
    body: PreparedLlamaCompletion | None = None,
    eog: Sequence[int] = (),
) -> Json:
    """The settings of a request, in llama-server's words; without the tokens `eog`."""
    n_predict = -1 if sampling.max_tokens is None else sampling.max_tokens
    logit_bias = sampling.logit_bias
    values = [] if logit_bias.tokens.size > MOST_BIASES_TOLD else logit_bias.values.tolist()
    bias = [
        {"token": token, "bias": value if value > float("-inf") else None}
        for token, value in zip(logit_bias.tokens[: len(values)].tolist(), values, strict=True)
    ]
    bias += [{"token": token, "bias": None} for token in eog]
    return {
        "n_ctx": n_ctx_slot,
        "model": model,
        **_OFF,
        **sampling_fields.write_params(sampling, Api.OPENAI),
        "seed": -1 if sampling.seed is None else sampling.seed,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": (body.generation.request.n_keep if body else None) or 0,
        "n_discard": body.generation.request.n_discard if body else 0,
        "stream": bool(body and body.generation.stream),
        "logit_bias": bias,
        "n_probs": sampling.logprobs or 0,
        "post_sampling_probs": sampling.post_sampling_probs,
        "grammar": body.grammar if body else "",
        "grammar_lazy": sampling.triggers is not None,
        "grammar_triggers": list(body.triggers) if body else [],
        "preserved_tokens": list(sampling.preserved_tokens),
        "timings_per_token": bool(body and body.generation.timings),
        "samplers": list(CHAIN if sampling.samplers is None else sampling.samplers),
    }


@dataclass
class LlamaAnswer(ProtocolAnswer):
    """The answer to one prompt, or to several. Each sequence's last event has `stop`."""

    choices: Sequence[LlamaChoice]
    is_batch: bool
    """Whether the answer is a list."""

    def whole(self, sequences: Sequence[TokenDelta]) -> Json | list[Json]:
        bodies = [choice.whole(own) for choice, own in zip(self.choices, sequences, strict=True)]
        return bodies if self.is_batch else bodies[0]

    def waiting(self) -> list[Json]:
        running = [choice for choice in self.choices if not choice.has_ended]
        return [choice.silence() for choice in running[:1]]

    def events(self, index: int, delta: TokenDelta) -> list[Json]:
        return self.choices[index].events(delta)
