"""`instructor`: answers as pydantic models, by JSON schema and by tools."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    city: str


TEXT = "Write a JSON object with name, age and city: Petra is 31 years old and lives in Leeds."
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": TEXT}],
            response_model=Person,
            temperature=0,
            max_tokens=200,
            max_retries=0,
        )
    assert isinstance(found, Person), found
    assert isinstance(found.age, int)
