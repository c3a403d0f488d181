"""Codex, non-interactive, over the responses API: an answer, and a loop with its shell tool."""

import os
import subprocess
import sys
from pathlib import Path

codex = sys.argv[1]
version = subprocess.run([codex, "--version"], capture_output=True, text=True, check=True).stdout
print("codex", version.split()[-1], flush=True)
URL = os.environ["GREENROOM_URL"]
SETTINGS = f"""
model = "demo"
model_provider = "greenroom"
model_context_window = 32768
web_search = "disabled"

[model_providers.greenroom]
name = "Greenroom"
base_url = "{URL}/v1"
wire_api = "responses"

[agents]
enabled = false
"""
os.environ["CODEX_HOME"] = os.path.abspath("codex")
Path("codex").mkdir()
Path("codex/config.toml").write_text(SETTINGS)
for prompt in ("Hello", "Say hi in the shell."):
    subprocess.run([codex, "exec", "--skip-git-repo-check", prompt], check=True, timeout=60,
                   stdin=subprocess.DEVNULL)  # fmt: skip
