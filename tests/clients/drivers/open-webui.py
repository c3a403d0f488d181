"""Open WebUI's backend, asked as its page does, over OpenAI's and over Ollama's API."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

print("open-webui", version("open-webui"), flush=True)
URL = os.environ["GREENROOM_URL"]
BY_OPENAI = {
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
}
BY_OLLAMA = {
    "OLLAMA_BASE_URL": URL,
    "ENABLE_OPENAI_API": "False",
}
WITHOUT_NETWORK = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "a secret of at least thirty-two characters",
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def call(port: int, path: str, body: Any = None, token: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    return json.loads(text) if text[:1] in "{[" else text


def wait(port: int) -> None:
    for _ in range(240):
        try:
            call(port, "/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    raise TimeoutError("Open WebUI did not start")


def run(settings: dict[str, str], folder: str) -> None:
    Path(folder).mkdir()
    port = free_port()
    own = {"DATA_DIR": os.path.abspath(folder), **WITHOUT_NETWORK, **settings}
    program = Path(sys.executable).with_name("open-webui")
    server = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **own}, stdout=sys.stderr,
    )  # fmt: skip
    try:
        wait(port)
        token = call(port, "/api/v1/auths/signin", {"email": "", "password": ""})["token"]
        print([model["id"] for model in call(port, "/api/models", token=token)["data"]])
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
        for stream in (False, True):
            print(call(port, "/api/chat/completions", {**chat, "stream": stream}, token))
        print(call(port, "/api/v1/tasks/title/completions", chat, token))
    finally:
        server.terminate()
        server.wait()


run(BY_OPENAI, "by-openai")
run(BY_OLLAMA, "by-ollama")
