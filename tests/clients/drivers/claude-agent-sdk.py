"""Anthropic's Agent SDK, which has its own Claude Code: a loop with a tool in this process."""

import asyncio
import os
from importlib.metadata import version
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, create_sdk_mcp_server, query, tool

print("claude-agent-sdk", version("claude-agent-sdk"))
URL = os.environ["GREENROOM_URL"]


@tool("greet", "Return a greeting.", {"language": str})
async def greet(args: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": f"A greeting in {args['language']}"}]}


async def main() -> None:
    options = ClaudeAgentOptions(
        model="demo",
        system_prompt="Be kind.",
        tools=[],
        mcp_servers={"host": create_sdk_mcp_server("host", tools=[greet])},
        allowed_tools=["mcp__host__greet"],
        env={
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    async for message in query(prompt="Greet me.", options=options):
        print(type(message).__name__, getattr(message, "result", ""))


asyncio.run(main())
