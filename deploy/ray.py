"""Ray Serve: replicas of the server, one a node, behind one address.

    python deploy/ray.py MODEL --replicas 1-3 --memory 4GiB [more options of `greenroom serve`]

docs/ray.md says what happens to requests. In a config file of Ray Serve, the application is
`deploy.ray:application`, and its `args` are options: {model: demo, replicas: 1-3, memory: 4GiB}.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: the name of this file would hide the package ray

import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response

from greenroom.cli.replicas import ReplicasCommand, parse_replicas
from greenroom.errors import GreenroomError
from greenroom.server.replicas.affinity import Affinity, Prefix, prefix_of
from greenroom.server.replicas.gate import RequestGate
from greenroom.server.replicas.hosted import HostedServer
from greenroom.server.replicas.responses import Answer
from greenroom.server.web.calls import Call

NAME = "greenroom"
CONTROL = 16  # requests to a replica beside those for answers


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that Affinity chooses; to the next one if it has no room."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        Affinity.replicas = frozenset(each.replica_id.unique_id for each in replicas)

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

    def __init__(self, command: ReplicasCommand) -> None:
        name, of = serve.get_replica_context().replica_id.unique_id, command
        super().__init__(name, of.model, of.name, of.load, of.serve, of.key)

    def check_health(self) -> None:
        self.check()

    def __del__(self) -> None:
        self.close()


class Gate:
    """Receives all requests, and passes each to a replica."""

    def __init__(self, replicas: DeploymentHandle, command: ReplicasCommand) -> None:
        self._all, self._one = replicas, replicas.options(method_name="answer", stream=True)
        self._gate = RequestGate(
            command.serve, command.key, command.replicas.bounds[1], self._ask, self._broadcast,
            RayActorError, lambda name: name not in Affinity.replicas,
        )  # fmt: skip

    async def __call__(self, request: Request) -> Response:
        return await self._gate.respond(request)

    @asynccontextmanager
    async def _ask(self, call: Call, failed: list[str]) -> AsyncIterator[Any]:
        stream = self._one.remote(call, prefix=prefix_of(call.body), failed=failed)
        try:
            yield stream
        finally:
            stream.cancel()

    async def _broadcast(self, call: Call) -> Sequence[Answer | BaseException]:
        results: Sequence[Answer | BaseException] = await self._all.broadcast(
            "answer_at_once", call
        ).results_async(return_exceptions=True)
        return results


def build(command: ReplicasCommand) -> serve.Application:
    """Make the application of a command line."""
    config, own = command.serve, command.replicas
    least, most = own.bounds
    requests = config.max_batch + config.max_queue + CONTROL
    replica = serve.deployment(Replica).options(
        max_replicas_per_node=1,
        max_ongoing_requests=requests,
        ray_actor_options={"num_cpus": command.load.threads or 1, "memory": command.memory_bytes},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"places": config.max_batch}
        ),
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=config.timeout,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": own.target or config.max_batch,
            "upscale_delay_s": own.upscale_delay,
            "downscale_delay_s": own.downscale_delay,
            "metrics_interval_s": min(10.0, own.upscale_delay / 3),
            "look_back_period_s": own.upscale_delay,
        },
    )
    gate = serve.deployment(Gate).options(
        max_ongoing_requests=requests * most,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.timeout,
    )
    return gate.bind(replica.bind(command), command)


def application(args: dict[str, Any]) -> serve.Application:
    """Make the application of a config file of Ray Serve, whose `args` are options."""
    model, *options = [args["model"]]
    for name in args.keys() - {"model"}:
        options += [f"--{name}"] if args[name] is True else [f"--{name}={args[name]}"]
    return build(parse_replicas("ray.py", [model, *options]))


def main() -> None:
    try:
        command = parse_replicas("ray.py", sys.argv[1:])
    except GreenroomError as error:
        sys.exit(f"ray.py: {error}")
    host, port = command.serve.host, command.serve.port
    ray.init(address=command.replicas.address)
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    for each in (signal.SIGINT, signal.SIGTERM):  # Ray has replaced them
        signal.signal(each, signal.default_int_handler)
    try:
        serve.run(build(command), name=NAME, logging_config={"enable_access_log": False})
        print(f"greenroom: {command.model} is served at http://{host}:{port}", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        with suppress(TimeoutError):  # running answers may end, for a minute
            serve.delete(NAME)
        serve.shutdown()


if __name__ == "__main__":
    main()
