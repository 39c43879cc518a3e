"""Ends a text at a line break: when its time is over, or where its lines are indented too little."""

from __future__ import annotations

from serve_app.sampling import SamplingParams

_BLANKS = " \t"


class LineLimits:
    """`n_indent` and `t_max_predict_ms` for one text. Decoder thread only.

    Source: llama.cpp, `process_token` in tools/server/server-context.cpp: an empty line has no indentation,
    and the first line is not looked at.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._n_indent = sampling.n_indent
        self._max_s = sampling.t_max_predict_ms / 1000
        self._blanks: int | None = None
        """That the line begins with; None in its middle, and in the first line."""

    def cut(self, text: str, elapsed_s: float) -> str | None:
        """The rest of the newest text, so many seconds after the first token, if the sequence ends
        with it; None if it goes on."""
        if not text:
            return None
        shown = self._indented(text) if self._n_indent else None
        if shown is None and 0 < self._max_s < elapsed_s and "\n" in text:
            return text
        return shown

    def _indented(self, text: str) -> str | None:
        for i, character in enumerate(text):
            if self._blanks is not None:
                if character in _BLANKS:
                    self._blanks += 1
                    continue
                if self._blanks < self._n_indent:
                    return text[:i]
            self._blanks = 0 if character == "\n" else None
        return None
