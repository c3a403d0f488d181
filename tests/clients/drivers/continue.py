"""Continue's command line: an answer, and a tool loop that reads a file."""

import os
import subprocess
import sys
from pathlib import Path

cn = sys.argv[1]
version = subprocess.run([cn, "--version"], capture_output=True, text=True, check=True).stdout
print("continue-cli", version.split()[-1], flush=True)
URL = os.environ["GREENROOM_URL"]
SETTINGS = f"""
name: Local
version: 1.0.0
schema: v1
models:
  - name: Greenroom
    provider: openai
    model: demo
    apiBase: {URL}/v1
    apiKey: none
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
Path("config.yaml").write_text(SETTINGS)
Path("note.txt").write_text("Buy bread.\n")
os.environ["CONTINUE_TELEMETRY_ENABLED"] = "0"
for prompt in ("Hello", "Read note.txt"):
    subprocess.run([cn, "--config", "config.yaml", "--auto", "-p", prompt], check=True, timeout=100,
                   stdin=subprocess.DEVNULL)  # fmt: skip
