"""`corral chat`: a conversation in the terminal with any server that speaks the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from serve_app.cli.client import Client, Json, ServerError

HELP = """\
/new            forget the conversation
/system TEXT    set the system prompt, and forget the conversation
/model NAME     talk to another model; without a name, list them
/quit           leave (Ctrl-D does, too). Ctrl-C ends an answer."""


@dataclass
class ChatSession:
    model: str
    system: str | None = None
    sampling: Json = field(default_factory=dict)
    messages: list[Json] = field(default_factory=list)

    def request(self) -> Json:
        first = [{"role": "system", "content": self.system}] if self.system else []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": first + self.messages} | options | self.sampling

    def reset(self) -> None:
        self.messages.clear()


@dataclass
class ChatAnswer:
    text: str = ""
    n_tokens: int = 0
    finish: str | None = None
    first_s: float | None = None
    """Seconds from the request to the first piece."""
    took_s: float = 0.0

    @property
    def summary(self) -> str:
        parts = [f"{self.n_tokens} tokens"] if self.n_tokens else []
        writing_s = self.took_s - (self.first_s or 0.0)
        if self.n_tokens > 1 and writing_s > 0:
            parts.append(f"{(self.n_tokens - 1) / writing_s:.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"first after {self.first_s:.2f} s")
        if self.finish == "length":
            parts.append("cut off: no room for more tokens")
        return ", ".join(parts)


def stream_pieces(
    client: Client, body: Json, answer: ChatAnswer, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, str]]:
    """("reasoning" or "text", piece) as they come; the answer is filled meanwhile. Raises ServerError."""
    began = clock()
    for event in client.events("/v1/chat/completions", body):
        if "error" in event:
            raise ServerError(str(event["error"].get("message", event["error"])))
        usage = event.get("usage") or {}
        answer.n_tokens = usage.get("completion_tokens", answer.n_tokens)
        answer.took_s = clock() - began
        for choice in event.get("choices", ()):
            answer.finish = choice.get("finish_reason") or answer.finish
            delta = choice.get("delta", {})
            for kind, piece in (
                ("reasoning", delta.get("reasoning_content")),
                ("text", delta.get("content")),
            ):
                if piece:
                    if answer.first_s is None:
                        answer.first_s = clock() - began
                    if kind == "text":
                        answer.text += piece
                    yield kind, piece


def ask(client: Client, conversation: ChatSession, prompt: str, console: Console) -> ChatAnswer:
    """Print the answer to a prompt as it comes. Both become part of the conversation, unless nothing
    came. Ctrl-C ends the answer. Raises ServerError."""
    conversation.messages.append({"role": "user", "content": prompt})
    answer = ChatAnswer()
    told = stream_pieces(client, conversation.request(), answer)
    writer: PlainWriter = MarkdownWriter(console) if console.is_terminal else PlainWriter(console)
    try:
        with writer:
            for kind, piece in told:
                writer.write(kind, piece)
    except KeyboardInterrupt:
        answer.finish = "stopped"
    except ServerError:
        conversation.messages.pop()
        raise
    if answer.text:
        conversation.messages.append({"role": "assistant", "content": answer.text})
    else:
        conversation.messages.pop()
    return answer


class PlainWriter:
    """Writes text as it is, for pipes and files."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> PlainWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._console.file.write("\n")

    def write(self, kind: str, piece: str) -> None:
        """Write a piece, unless it is what the model thinks to itself."""
        if kind == "text":
            self._console.file.write(piece)
            self._console.file.flush()


class MarkdownWriter(PlainWriter):
    """Renders Markdown block by block: what is complete stays, and the rest is shown as it grows."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rest = ""
        self._kind = "text"
        self._live = Live(console=console, transient=True, refresh_per_second=12)

    def __enter__(self) -> MarkdownWriter:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._live.stop()

    def write(self, kind: str, piece: str) -> None:
        """Show a piece of the text, or of what the model thinks to itself."""
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._rest += piece
        done, self._rest = split_blocks(self._rest)
        if done:
            self._live.update(Text(""))
            self._live.console.print(self._render(done))
        self._live.update(Text(self._rest, style="dim" if kind == "reasoning" else ""))

    def _flush(self) -> None:
        self._live.update(Text(""))
        if self._rest.strip():
            self._live.console.print(self._render(self._rest))
        self._rest = ""

    def _render(self, text: str) -> Any:
        return Text(text.strip(), style="dim") if self._kind == "reasoning" else Markdown(text)


def split_blocks(text: str) -> tuple[str, str]:
    """The Markdown blocks that end, at a blank line outside code, and the one that may go on."""
    end, fenced, position = 0, False, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        if not line.strip() and not fenced and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


def converse(client: Client, conversation: ChatSession, console: Console) -> None:
    """Talk until /quit or the end of the input. Raises ServerError if there is no model to talk to."""
    console.print(f"[bold]{conversation.model}[/] at {client.url}. /help lists commands.")
    while True:
        try:
            line = console.input("\n[bold green]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                _obey(line, client, conversation, console)
            elif line:
                answer = ask(client, conversation, line, console)
                console.print(answer.summary, style="dim")
        except ServerError as error:
            console.print(str(error), style="red", markup=False)


def _obey(line: str, client: Client, conversation: ChatSession, console: Console) -> None:
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command == "/new":
        conversation.reset()
        console.print("The conversation is forgotten.", style="dim")
    elif command == "/system":
        conversation.system = argument or None
        conversation.reset()
        console.print("The conversation begins anew.", style="dim")
    elif command == "/model":
        known = client.models()
        if argument in known:
            conversation.model = argument
        console.print(
            ", ".join(known) if argument not in known else f"Now with {argument}.", style="dim"
        )
    else:
        console.print(HELP, style="dim", markup=False)
