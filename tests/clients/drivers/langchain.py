"""LangChain over OpenAI's, Anthropic's and Ollama's APIs: chat, stream, tool, structured output."""

import os
from importlib.metadata import version
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

PACKAGES = ("langchain-openai", "langchain-anthropic", "langchain-ollama")
print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
URL = os.environ["GREENROOM_URL"]

Language = Literal["English", "German"]


class Greeting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Language


@tool(args_schema=Greeting)
def greet(language: Language) -> str:
    """Return a greeting."""
    return {"English": "Hello!", "German": "Hallo!"}[language]


class Review(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


by_openai = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model="demo", temperature=0, max_tokens=60
)
by_anthropic = ChatAnthropic(
    base_url=URL, api_key="none", model="demo", temperature=0, max_tokens=60
)
by_ollama = ChatOllama(base_url=URL, model="demo", temperature=0, num_predict=60)
for model in (by_openai, by_anthropic, by_ollama):
    print(model.invoke("Hello").text)
    print("".join(chunk.text for chunk in model.stream("Hello")))
    print(model.with_structured_output(Review, method="json_schema").invoke("A lovely film."))
for model in (by_openai, by_anthropic):
    asked = [("user", "Hello")]
    called = model.bind_tools([greet], tool_choice="greet", strict=True).invoke(asked)
    results = [greet.invoke(call) for call in called.tool_calls]
    print(called.tool_calls[0]["args"], model.invoke([*asked, called, *results]).text)
