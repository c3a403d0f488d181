"""Pydantic AI over OpenAI's two APIs, Anthropic's and Ollama's: text, stream, output types."""

import os
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

print("pydantic-ai-slim", version("pydantic-ai-slim"))
URL = os.environ["GREENROOM_URL"]
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=URL, api_key="none")
SETTINGS = {"temperature": 0, "max_tokens": 60}


class Review(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


for model in (
    OpenAIChatModel("demo", provider=openai),
    OpenAIResponsesModel("demo", provider=openai),
    AnthropicModel("demo", provider=anthropic),
):
    agent = Agent(model, model_settings=SETTINGS)
    print(agent.run_sync("Hello").output)
    print("".join(agent.run_stream_sync("Hello").stream_text(delta=True)))
    critic = Agent(model, model_settings=SETTINGS, output_type=Review)
    print(critic.run_sync("A lovely film.").output)
    if isinstance(model, AnthropicModel):
        continue  # it knows native output of Anthropic's own models only
    critic = Agent(model, model_settings=SETTINGS, output_type=NativeOutput(Review))
    print(critic.run_sync("A lovely film.").output)
