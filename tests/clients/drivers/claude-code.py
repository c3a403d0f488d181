"""Claude Code, print mode: an answer, and a tool loop that reads a file."""

import os
import subprocess
import sys
from pathlib import Path

claude = sys.argv[1]
version = subprocess.run([claude, "--version"], capture_output=True, text=True, check=True).stdout
print("claude-code", version.split()[0], flush=True)
URL = os.environ["GREENROOM_URL"]
os.environ |= {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "demo",
    "ANTHROPIC_SMALL_FAST_MODEL": "demo",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
Path("note.txt").write_text("Buy bread.\n")
for prompt in ("Hello", "Read note.txt"):
    subprocess.run([claude, "-p", prompt, "--tools", "Read,Skill"], check=True, timeout=100)
