"""LlamaIndex, over OpenAI's protocol and Ollama's."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

URL = sys.argv[1]
QUESTION = "What is the capital of Italy?"
ANSWER = "The capital of Italy is Rome."

for llm in (
    OpenAILike(
        model="demo", api_base=f"{URL}/v1", api_key="none", is_chat_model=True, temperature=0
    ),
    Ollama(model="demo", base_url=URL, temperature=0, request_timeout=60, context_window=2048),
):
    told = llm.chat([ChatMessage(role="user", content=QUESTION)])
    assert told.message.content == ANSWER, told
    *_, last = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert last.message.content == ANSWER, last
