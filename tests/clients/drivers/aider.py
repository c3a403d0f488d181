"""aider: a question, and an edit of a file, over OpenAI's and over Ollama's API."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

print("aider-chat", version("aider-chat"), flush=True)
URL = os.environ["GREENROOM_URL"]
os.environ |= {
    "OPENAI_API_BASE": f"{URL}/v1",
    "OPENAI_API_KEY": "none",
    "OLLAMA_API_BASE": URL,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
aider = [sys.executable, "-m", "aider", "--no-git", "--yes-always", "--no-show-model-warnings",
         "--analytics-disable", "--no-check-update", "--map-tokens", "0"]  # fmt: skip
for model in ("openai/demo", "ollama_chat/demo"):
    Path("note.txt").write_text("Buy bread.\n")
    ask = ["--model", model, "--chat-mode", "ask", "--message", "Hello"]
    subprocess.run([*aider, *ask], check=True, timeout=100)
    edit = ["--model", model, "--edit-format", "whole", "--message", "Buy milk, too.", "note.txt"]
    subprocess.run([*aider, *edit], check=True, timeout=100)
    print(model, Path("note.txt").read_text(), flush=True)
