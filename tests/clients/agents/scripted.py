"""A server whose model follows a script: all of Corral is real, but for which token a sampler picks.

`serve run` takes `tests.clients.agents.scripted:build` for `serve_app.app:build`. Prompts are rendered,
tokenized, computed by llama.cpp and cached as ever. The answer is what `script` makes of the prompt's text:
a coding agent reads a task, calls its tool that writes files, sees the tool's result, and ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from ray import serve
from ray.serve import Application

from serve_app import app
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import Sampled, TokenLogprobs
from serve_app.cluster.replica import process_place
from serve_app.config.resolved import ResolvedModel
from serve_app.engine.backends import llama_cpp, opening
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.run.replica.loaded_model import LoadedModel, load_parts

TASK = re.compile(r"Create the file (?P<path>[\w./-]+) with the text (?P<text>[\w-]+)")
"""The task that a test gives to an agent."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The words by which mini-swe-agent's commands end a task."""
ANSWER = "Hello."
"""What the model says where there is no task."""
RESULT = "<tool_response>"
"""The text before a tool's result, in the built-in model's chat template."""


def script(prompt: str) -> str:
    """The answer to a rendered prompt: a tool call for the newest task, or the end after its result."""
    tasks = list(TASK.finditer(prompt))
    if not tasks:
        return ANSWER
    task = tasks[-1]
    if RESULT in prompt[task.end() :]:
        return _end(prompt, task["path"])
    return _write(prompt, task["path"], task["text"])


def _end(prompt: str, path: str) -> str:
    """The last words: a call where an agent ends by a tool or a command, else a sentence."""
    if _SUBMIT in prompt:
        return call("bash", {"command": f"echo {_SUBMIT}"})
    return f"The file {path} is written."


def _write(prompt: str, path: str, text: str) -> str:
    """A call of the first tool of the prompt that can write a file; without tools, the whole file."""
    echo = f"echo {text} > {path}"
    tools: tuple[tuple[str, dict[str, Any]], ...] = (
        ("exec_command", {"cmd": echo}),
        ("shell_command", {"command": echo}),
        ("shell", {"command": ["bash", "-lc", echo]}),
        ("run_shell_command", {"command": echo, "is_background": False}),
        ("execute_bash", {"command": echo}),
        ("terminal", {"command": echo}),
        ("bash", {"command": echo, "description": "Writes the file"}),
        ("Bash", {"command": echo, "description": "Writes the file"}),
        ("execute_command", {"command": echo, "requires_approval": False}),
        ("run_commands", {"commands": [echo]}),
        ("write_to_file", {"path": path, "content": text}),
        ("write_file", {"file_path": path, "content": text}),
    )
    for name, arguments in tools:
        if offers(prompt, name):
            return call(name, arguments)
    return f"{path}\n```\n{text}\n```\n"


def call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in the built-in model's format."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def offers(prompt: str, name: str) -> bool:
    """Whether the prompt's list of tools has one of that name."""
    return re.search(rf'"name": ?"{name}"', prompt) is not None


class ScriptedSampler:
    """Picks the script's tokens one after the other. Decoder thread only."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)

    def sample(self, row: int) -> Sampled:
        """The next token of the script, whatever the row's logits say."""
        return Sampled(next(self._tokens))

    def score(self, row: int, token: int) -> TokenLogprobs:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


class ScriptedBackend(llama_cpp.LlamaBackend):
    """llama.cpp with the built-in model, whose samplers follow the script."""

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> Any:
        """A sampler for the answer to this prompt."""
        vocabulary = self.vocabulary
        text = b"".join(vocabulary.piece(token, special=True) for token in prompt)
        answer = script(text.decode(errors="replace"))
        tokens = vocabulary.tokenize(answer, add_special=False, parse_special=False)
        end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
        return ScriptedSampler([*tokens, end])


@serve.deployment
class ScriptedReplica(LoadedModel):
    """An engine replica whose model follows the script."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        patch.object(opening, "LlamaBackend", ScriptedBackend).start()
        super().__init__(await load_parts(model, process_place(keeps_texts=model.data_at_rest)))

    async def __del__(self) -> None:
        if vars(self):
            await self.leave()


def build(args: dict[str, Any]) -> Application:
    """The application of `serve_app.app.build`, with scripted replicas."""
    with patch.object(app, "EngineReplica", ScriptedReplica):
        return app.build(args)
