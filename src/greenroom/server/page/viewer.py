"""A server on loopback that shows a recording on the live page; it needs the standard library."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from greenroom.errors import UsageError
from greenroom.server.http.keys import is_loopback
from greenroom.server.page.assets import DATA, HEADERS, Asset, assets

HOST = "127.0.0.1"


class Viewer(ThreadingHTTPServer):
    """HTTP server of the live page's files and one recording, for this machine alone.

    UsageError if the port cannot be used. Port 0 takes any free port.
    """

    daemon_threads = True

    def __init__(self, recording: dict[str, Any], port: int) -> None:
        body = json.dumps(recording, separators=(",", ":")).encode()
        self.assets = assets() | {DATA: Asset(body, "application/json")}
        try:
            super().__init__((HOST, port), ViewerRequest)
        except OSError as error:
            raise UsageError(
                f"cannot listen on port {port}: {error.strerror or error}: choose another with"
                " --port, or 0 for any"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"


class ViewerRequest(BaseHTTPRequestHandler):
    """One HTTP request to a viewer; a Host header must name this machine (DNS rebinding)."""

    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        host = self.headers.get("host", "").rpartition(":")
        asset = self.server.assets.get(self.path)
        if not is_loopback(host[0] or host[2]):
            self.send_error(403, "the Host header must be localhost")
        elif asset is None:
            self.send_error(404)
        else:
            self.send_response(200)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("content-type", asset.media_type)
            self.send_header("content-length", str(len(asset.content)))
            self.end_headers()
            self.wfile.write(asset.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: the command shows one line."""
