"""Many questions at once, a line each, which the server batches: python many.py < QUESTIONS."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
    max_retries=10,  # a full queue says when to come back, and the client waits that long
)
AT_ONCE = asyncio.Semaphore(16)


async def ask(model, question):
    async with AT_ONCE:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=100
        )
    return f"{question} -> {answer.choices[0].message.content}"


async def main():
    model = (await client.models.list()).data[0].id
    questions = [line.strip() for line in sys.stdin if line.strip()]
    for answered in asyncio.as_completed([ask(model, question) for question in questions]):
        print(await answered)


asyncio.run(main())
