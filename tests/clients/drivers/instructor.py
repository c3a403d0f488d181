"""instructor: an answer in the form of a Pydantic model, by a tool call and by a JSON schema."""

import os
from importlib.metadata import version
from typing import Literal

import instructor
from pydantic import BaseModel, ConfigDict

print("instructor", version("instructor"))
URL = os.environ["GREENROOM_URL"]


class Review(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]
    stars: Literal[1, 2, 3, 4, 5]


MESSAGES = [{"role": "user", "content": "A lovely film."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_provider(
        "openai/demo", base_url=f"{URL}/v1", api_key="none", mode=mode
    )
    print(client.create(response_model=Review, messages=MESSAGES, temperature=0, max_tokens=60))
