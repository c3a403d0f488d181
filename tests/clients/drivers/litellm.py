"""LiteLLM over OpenAI's, Anthropic's and Ollama's APIs: chat, stream, tools, the responses API."""

import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not downloaded
import litellm

print("litellm", version("litellm"))
URL = os.environ["GREENROOM_URL"]
HELLO = [{"role": "user", "content": "Hello"}]
LANGUAGE = {"type": "string", "enum": ["English", "German"]}
PARAMETERS = {
    "type": "object",
    "properties": {"language": LANGUAGE},
    "required": ["language"],
    "additionalProperties": False,
}
GREET = {"type": "function", "function": {"name": "greet", "parameters": PARAMETERS}}
SETTINGS = {"temperature": 0, "max_tokens": 60, "api_key": "none"}
for model, base in (
    ("openai/demo", f"{URL}/v1"),
    ("anthropic/demo", URL),
    ("ollama_chat/demo", URL),
):
    chat = {"model": model, "api_base": base, "messages": HELLO, **SETTINGS}
    print(litellm.completion(**chat).choices[0].message.content)
    chunks = litellm.completion(**chat, stream=True)
    print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    if not model.startswith("ollama"):
        called = litellm.completion(**chat, tools=[GREET], tool_choice="required")
        print(called.choices[0].message.tool_calls[0].function)
response = litellm.responses(
    model="openai/demo", input="Hello", api_base=f"{URL}/v1", api_key="none", temperature=0,
    max_output_tokens=60,
)  # fmt: skip
print(response.output_text)
