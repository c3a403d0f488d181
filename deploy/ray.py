"""Ray Serve: replicas of the server, one a node, behind one address.

    python deploy/ray.py MODEL --replicas 1-3 --memory 4GiB [more options of `greenroom serve`]

docs/ray.md says what happens to requests. In a config file of Ray Serve, the application is
`deploy.ray:application`, and its `args` are options: {model: demo, replicas: 1-3, memory: 4GiB}.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: the name of this file would hide the package ray

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from greenroom.cli import parser
from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import take
from greenroom.cli.serve import name_of
from greenroom.config import Amount, LoadConfig, ServeConfig
from greenroom.errors import GreenroomError, UsageError
from greenroom.server.http.errors import ApiError
from greenroom.server.http.keys import check_address, read_api_key
from greenroom.server.replicas.affinity import Affinity, Prefix, prefix_of
from greenroom.server.replicas.hosted import HostedServer
from greenroom.server.replicas.relay import refused, relay
from greenroom.server.replicas.responses import EVERYWHERE, joined
from greenroom.server.web.calls import Call, Headers

PROBE_S, SPARE_S = 5.0, 30.0  # that /health waits for a replica; others, beyond --timeout
CONTROL = 16  # requests to a replica beside those for answers


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that Affinity chooses; to the next one if it has no room."""

    def initialize_state(self, places: int) -> None:
        self._affinity = Affinity(places)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        options = pending_request.kwargs if pending_request else {}
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        prefix, failed = options.get("prefix", Prefix()), options.get("failed", ())
        return [[replicas[name]] for name in self._affinity.order([*replicas], prefix, failed)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        prefix = pending_request.kwargs.get("prefix", Prefix())
        request = pending_request.metadata.internal_request_id
        self._affinity.begin(replica_id.unique_id, request, prefix)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._affinity.end(replica_id.unique_id, internal_request_id)


class Replica(HostedServer):
    """One node's server, under the budget of its own process."""

    def __init__(self, model: str, load: LoadConfig, config: ServeConfig, key: str | None) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(name, model, config.model_name or name_of(model), load, config, key)

    async def answer_for(self, call: Call, **_: Any) -> AsyncIterator[Any]:
        """Answer a call; the other arguments are for the router."""
        async with aclosing(self.answer(call)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        self.check()

    def __del__(self) -> None:
        self.close()


class Gate:
    """Receives all requests, and passes each to a replica."""

    def __init__(self, replicas: DeploymentHandle, config: ServeConfig) -> None:
        self._all, self._one = replicas, replicas.options(method_name="answer_for", stream=True)
        self._max_body = Amount.parse(config.max_body, "--max-body").nbytes or 0
        self._timeout = config.timeout + SPARE_S

    async def __call__(self, request: Request) -> Response:
        path, body = request.url.path, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body:
                return refused(path, ApiError(413, "the body is larger than --max-body allows"))
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        call = Call(request.method, path, headers, bytes(body), request.url.query.encode())
        try:
            async with asyncio.timeout(PROBE_S if path == "/health" else self._timeout):
                return await self._answer(call)
        except TimeoutError:
            return refused(path, ApiError(503, "no replica is ready", retry_after_s=5))

    async def _answer(self, call: Call) -> Response:
        if call.path in EVERYWHERE:
            asked = self._all.broadcast("answer_at_once", call)
            found = await asked.results_async(return_exceptions=True)
            if not (answers := [each for each in found if isinstance(each, tuple)]):
                raise TimeoutError
            status, headers, body = joined(call.path, answers)
            return _response(Response(body, status), headers)
        prefix = prefix_of(call.body)

        @asynccontextmanager
        async def ask(failed: list[str]) -> AsyncIterator[Any]:
            stream = self._one.remote(call, prefix=prefix, failed=failed)
            try:
                yield stream
            finally:
                stream.cancel()

        parts = relay(call, ask, RayActorError)
        status, headers = await anext(parts)
        return _response(StreamingResponse(parts, status), headers)


def _response(response: Response, headers: Headers) -> Response:
    response.raw_headers = [each for each in headers if each[0] != b"x-request-id"]  # Serve has one
    return response


def build(words: Sequence[str]) -> tuple[argparse.Namespace, ServeConfig, serve.Application]:
    """Make the application of a command line; UsageError if the line is wrong."""
    own = argparse.ArgumentParser(
        "ray.py", usage="%(prog)s MODEL [options]", allow_abbrev=False,
        epilog="All options of `greenroom serve` are options of each replica.",
    )  # fmt: skip
    own.add_argument("--replicas", metavar="N|MIN-MAX", default="1", help="at most one a node")
    own.add_argument("--target", metavar="N", type=float, help="requests of a replica at a time,"
                     " from which MIN-MAX is decided (default: --max-batch)")  # fmt: skip
    own.add_argument("--upscale-delay", metavar="S", type=float, default=30.0)
    own.add_argument("--downscale-delay", metavar="S", type=float, default=600.0)
    own.add_argument("--address", help="of a running cluster (default: RAY_ADDRESS, or a new one)")
    options, rest = own.parse_known_args(words)
    args = parser().parse_args(["serve", *rest])
    load, config = take(args, LoadConfig), take(args, ServeConfig)
    config.check_drafts()
    check_early(load)
    key = read_api_key(config.api_key_file)
    check_address(config.host, key)
    least, most = replicas_of(options.replicas)
    memory = (
        Amount.parse(load.memory, "--memory").nbytes if load.memory not in (None, "auto") else 0
    )
    places = config.max_batch + config.max_queue + CONTROL
    replica = serve.deployment(Replica).options(
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": load.threads or 1, "memory": memory or 0},
        max_ongoing_requests=places,
        graceful_shutdown_timeout_s=config.timeout,
        health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"places": config.max_batch}
        ),
        autoscaling_config={
            "min_replicas": least, "max_replicas": most,
            "target_ongoing_requests": options.target or config.max_batch,
            "upscale_delay_s": options.upscale_delay, "downscale_delay_s": options.downscale_delay,
            "metrics_interval_s": min(10.0, max(0.5, options.upscale_delay / 3)),
            "look_back_period_s": max(1.0, options.upscale_delay),
        },
    )  # fmt: skip
    gate = serve.deployment(Gate).options(
        max_ongoing_requests=places * most, graceful_shutdown_timeout_s=config.timeout,
        ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    return options, config, gate.bind(replica.bind(args.model, load, config, key), config)


def replicas_of(text: str) -> tuple[int, int]:
    """Return the least and the largest number of replicas of `3` or `1-3`."""
    numbers = [int(each) for each in text.split("-") if each.isdigit()]
    if (
        len(numbers) != text.count("-") + 1
        or not 1 <= numbers[0] <= numbers[-1]
        or len(numbers) > 2
    ):
        raise UsageError(f"--replicas must be a number or MIN-MAX, got {text}")
    return numbers[0], numbers[-1]


def application(args: dict[str, Any]) -> serve.Application:
    """Make the application of a config file of Ray Serve."""
    model, options = args["model"], {k: v for k, v in args.items() if k != "model"}
    return build([model, *(f"--{name}={value}" for name, value in options.items())])[2]


def main() -> None:
    try:
        options, config, app = build(sys.argv[1:])
    except GreenroomError as error:
        sys.exit(f"ray.py: {error}")
    ray.init(address=options.address)
    serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": config.port})
    serve.run(app, blocking=True, name="greenroom")


if __name__ == "__main__":
    main()
