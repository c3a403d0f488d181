"""llm with tools: a loop of a call and its result."""

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
"""
Path("extra-openai-models.yaml").write_text(SETTINGS)
os.environ |= {"LLM_USER_PATH": ".", "OPENAI_API_KEY": "none"}
tools = ["-T", "llm_version", "Which version?"]
subprocess.run([sys.executable, "-m", "llm", "-m", "greenroom", *tools], check=True)
