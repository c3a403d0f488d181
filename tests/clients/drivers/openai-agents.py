"""OpenAI's Agents SDK over the responses API and over chat completions: a tool loop, streamed."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

print("openai-agents", version("openai-agents"))
URL = os.environ["GREENROOM_URL"]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")

Language = Literal["English", "German"]


@function_tool
def greet(language: Language) -> str:
    """Return a greeting."""
    return {"English": "Hello!", "German": "Hallo!"}[language]


class Review(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="demo", openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
        agent = Agent("Host", instructions="Be kind.", model=model, tools=[greet],
                      model_settings=settings)  # fmt: skip
        print((await Runner.run(agent, "Hello")).final_output)
        streamed = Runner.run_streamed(agent, "Hello")
        print([event.type async for event in streamed.stream_events()][-1], streamed.final_output)
        critic = Agent("Critic", model=model, output_type=Review,
                       model_settings=ModelSettings(temperature=0, max_tokens=60))  # fmt: skip
        print((await Runner.run(critic, "A lovely film.")).final_output)


asyncio.run(main())
