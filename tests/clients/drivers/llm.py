"""llm, Simon Willison's command line: a model of extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

print("llm", version("llm"), flush=True)
URL = os.environ["GREENROOM_URL"]
SETTINGS = f"""
- model_id: greenroom
  model_name: demo
  api_base: {URL}/v1
  supports_tools: true
  supports_schema: true
"""
Path("extra-openai-models.yaml").write_text(SETTINGS)
os.environ |= {"LLM_USER_PATH": ".", "OPENAI_API_KEY": "none"}
llm = [sys.executable, "-m", "llm", "-m", "greenroom", "-o", "temperature", "0"]
short = ["-o", "max_tokens", "60"]
subprocess.run([*llm, *short, "Hello"], check=True)
subprocess.run([*llm, *short, "--no-stream", "-s", "Be kind.", "Hello"], check=True)
mood = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
subprocess.run([*llm, *short, "--schema", json.dumps(mood), "A lovely film."], check=True)
