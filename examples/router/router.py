# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small KV-aware router in front of vLLM engines that serve each other's KV.

It keeps what each engine holds by the engine's KV events, sends each completion to
where it is cheapest, and tells that engine which blocks another one has. An example
to start from: one process, no retries, no authentication.

    python examples/router/router.py --port 8080 \\
        --engine http://10.0.0.5:8000 tcp://10.0.0.5:5557 tcp://10.0.0.5:24990 \\
        --engine http://10.0.0.6:8000 tcp://10.0.0.6:5557 tcp://10.0.0.6:24990

An engine is its address, the endpoint of its KV events and its control endpoint. Only
prompts of token ids are looked up, see the README beside this file.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.routing import KvIndex, fetch_hint

POLL_SECONDS = 0.02

# What a token costs that is pulled from a peer, where computing one costs 1.
PULL_COST = 0.1


@dataclass
class Engine:
    """What the router knows of an engine."""

    url: str
    control_endpoint: str
    index: KvIndex
    # The cost of all that it was sent and has not answered.
    outstanding: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class Route:
    """Where a request goes, and which of another engine's blocks it is told of."""

    engine: Engine
    cost: float
    source: Engine | None = None
    hashes: tuple[int | bytes, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """For whoever wants to know."""
        source = self.source.url if self.source else ""
        return {
            "x-kvcr-engine": self.engine.url,
            "x-kvcr-source": source,
            "x-kvcr-hinted-blocks": str(len(self.hashes)),
        }


def choose(
    engines: Sequence[Engine], prompt: Sequence[int], pull_cost: float = PULL_COST
) -> Route:
    """The cheapest route: what is to be computed and pulled, and what is to wait for.

    Among equals the engine that has been sent less.
    """
    routes = []
    for engine in engines:
        own = len(engine.index.held(prompt)) * engine.index.block_tokens
        best = Route(engine, len(prompt) - own)
        for peer in engines:
            if peer is engine:
                continue
            hashes = peer.index.pullable(prompt)
            pulled = len(hashes) * peer.index.block_tokens - own
            cost = len(prompt) - own - pulled + pull_cost * pulled
            if pulled > 0 and cost < best.cost:
                best = Route(engine, cost, peer, tuple(hashes))
        routes.append(best)
    return min(
        routes,
        key=lambda r: (r.cost + r.engine.outstanding, r.engine.requests),
    )


class Router:
    """Engines, their events, and the connections to them."""

    def __init__(
        self, engines: Sequence[Sequence[str]], pull_cost: float = PULL_COST
    ) -> None:
        self._pull_cost = pull_cost
        self._subscriptions = [
            Subscription(events, replay=replay[0] if replay else None)
            for _, events, _, *replay in engines
        ]
        self.engines = [
            Engine(url.rstrip("/"), control, subscription.index)
            for (url, _, control, *_), subscription in zip(
                engines, self._subscriptions, strict=True
            )
        ]
        # Engines answer when they can, and the client decides how long that may take.
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        listening = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            await self._http.aclose()
            for subscription in self._subscriptions:
                subscription.__exit__(None, None, None)

    async def _listen(self) -> None:
        """What nobody reads would be lost after a thousand messages."""
        while True:
            self._read()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> None:
        for subscription in self._subscriptions:
            subscription.read()

    async def completion(self, body: dict[str, Any]) -> Response:
        self._read()
        route = choose(self.engines, token_ids(body), self._pull_cost)
        if route.source is not None:
            hint = fetch_hint(route.source.control_endpoint, route.hashes)
            others = body.get("kv_transfer_params") or {}
            body = {**body, "kv_transfer_params": {**others, "kv_hint": hint}}
        request = self._http.build_request(
            "POST", f"{route.engine.url}/v1/completions", json=body
        )
        # A prompt of which nothing is known counts as one token.
        cost = max(route.cost, 1.0)
        route.engine.requests += 1
        route.engine.outstanding += cost

        def done() -> None:
            route.engine.outstanding -= cost

        try:
            answer = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            done()
            return Response(f"{route.engine.url}: {error!r}", 502, route.headers)
        except BaseException:
            done()
            raise
        return Relay(answer, route.headers, done)


class Relay(StreamingResponse):
    """An engine's answer, handed on as it comes."""

    def __init__(
        self, answer: httpx.Response, headers: dict[str, str], done: Callable[[], None]
    ) -> None:
        media_type = answer.headers.get("content-type")
        super().__init__(
            answer.aiter_bytes(), answer.status_code, headers, media_type=media_type
        )
        self._answer = answer
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also where the client has gone: the engine then stops working on it.
            self._done()
            await self._answer.aclose()


def token_ids(body: dict[str, Any]) -> list[int]:
    """The prompt, if it is one of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return []


def application(router: Router) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with router.running():
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await router.completion(await request.json())

    @app.get("/health")
    async def health() -> dict[str, float]:
        return {engine.url: engine.outstanding for engine in router.engines}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A small KV-aware router in front of vLLM engines with KVCR."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--engine",
        nargs="+",
        action="append",
        required=True,
        metavar="URL EVENTS CONTROL [REPLAY]",
        help="an engine's address, the endpoint of its KV events, its control endpoint "
        "and, if it has one, its replay endpoint",
    )
    parser.add_argument(
        "--pull-cost",
        type=float,
        default=PULL_COST,
        help="of a token pulled from a peer; computing one costs 1 (default: "
        "%(default)s)",
    )
    given = parser.parse_args()
    for engine in given.engine:
        if len(engine) not in (3, 4):
            parser.error(f"--engine {' '.join(engine)}: give URL EVENTS CONTROL")
    router = Router(given.engine, given.pull_cost)
    uvicorn.run(
        application(router), host=given.host, port=given.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
