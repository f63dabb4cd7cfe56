# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The example's router: where it sends a request, with which hint.

The engines here answer without a model; tests/fleet runs it in front of real ones.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from tests.vllm_kvcr.publishing import BOTH, FIRST, PROMPT, SECOND, Engine

FILE = Path(__file__).resolve().parents[2] / "examples/router/router.py"
spec = importlib.util.spec_from_file_location("example_router", FILE)
assert spec is not None
assert spec.loader is not None
router = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = router
spec.loader.exec_module(router)

# --- the decision ----------------------------------------------------------------

BLOCK = 16
LONG = list(range(100))
HASHES = [1000 + end for end in range(BLOCK, 97, BLOCK)]


def engine(name: str, held: int = 0, *, medium: str = "CPU", busy: float = 0.0) -> Any:
    """Holds that many blocks of the prompt."""
    index = router.KvIndex()
    event = {
        "type": "BlockStored",
        "block_hashes": HASHES[:held],
        "parent_block_hash": None,
        "token_ids": LONG[: held * BLOCK],
        "block_size": BLOCK,
        "medium": medium,
    }
    index.apply(event)
    return router.Engine(name, f"tcp://{name}:1", index, busy)


@pytest.mark.parametrize(
    ("engines", "chosen", "source", "hinted"),
    [
        ([engine("a"), engine("b")], "a", None, 0),
        ([engine("a"), engine("b", 6)], "b", None, 0),
        ([engine("a", 2), engine("b", 6)], "b", None, 0),
        ([engine("a"), engine("b", 6, busy=50)], "a", "b", 6),
        ([engine("a", 2), engine("b", 6, busy=50)], "a", "b", 6),
        # Peers cannot pull from a GPU, so waiting for it costs less than computing.
        ([engine("a"), engine("b", 6, medium="GPU", busy=50)], "b", None, 0),
        ([engine("a"), engine("b", 6, medium="GPU", busy=150)], "a", None, 0),
        ([engine("a", busy=90), engine("b"), engine("c", 6, busy=90)], "b", "c", 6),
        ([engine("a"), engine("b", 3, busy=90), engine("c", 5, busy=90)], "a", "c", 5),
    ],
)
def test_a_request_goes_where_it_is_cheapest(
    engines: list[Any], chosen: str, source: str | None, hinted: int
) -> None:
    route = router.choose(engines, LONG)
    assert route.engine.url == chosen
    assert (route.source.url if route.source else None) == source
    assert list(route.hashes) == HASHES[:hinted]


def test_among_equals_the_work_is_shared_and_slow_pulls_are_left_alone() -> None:
    engines = [engine("a"), engine("b")]
    engines[0].requests = 1
    assert router.choose(engines, LONG).engine.url == "b"
    route = router.choose([engine("a"), engine("b", 6, busy=200)], LONG, 1.5)
    assert (route.engine.url, route.source) == ("a", None)


# --- over HTTP -------------------------------------------------------------------


class StandIn:
    """Answers with what it was asked, when it may."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.app = FastAPI()

        @self.app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            self.asked.append(await request.json())
            await self.may_answer.wait()
            return Response("answer", 418, media_type="text/plain")


def check(folder: Path, body: Callable[[Any, httpx.AsyncClient, Any], Any]) -> None:
    """Run ``body`` with a router in front of two engines, of which ``a`` publishes."""
    a = Engine(folder)
    a.publish(*BOTH)
    engines = [
        ["http://a", a.events, "tcp://a:1", a.replay],
        ["http://b", f"ipc://{folder}/absent", "tcp://b:1"],
    ]

    async def run() -> None:
        routed = router.Router(engines)
        stand_ins = {"a": StandIn(), "b": StandIn()}
        routed._http = httpx.AsyncClient(
            mounts={
                f"http://{name}": httpx.ASGITransport(stand_in.app)
                for name, stand_in in stand_ins.items()
            },
            transport=httpx.MockTransport(lambda request: httpx.Response(500)),
        )
        transport = httpx.ASGITransport(router.application(routed))
        async with (
            routed.running(),
            httpx.AsyncClient(transport=transport, base_url="http://router") as client,
        ):
            await body(stand_ins, client, routed)

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        a.stop()


async def sent(client: httpx.AsyncClient, engine: StandIn, prompt: list[int]) -> Any:
    """A request that has reached this engine."""
    sending = client.post("/v1/completions", json={"prompt": prompt})
    request = asyncio.create_task(sending)
    while not engine.asked:
        await asyncio.sleep(0.001)
    return request


def test_the_hint_goes_with_the_request_and_the_answer_comes_back(tmp_path) -> None:
    async def body(stand_ins: Any, client: httpx.AsyncClient, routed: Any) -> None:
        first = await sent(client, stand_ins["a"], PROMPT)
        # It holds the prompt, and is busy with a longer one.
        routed.engines[0].outstanding = 100.0
        stand_ins["b"].may_answer.set()
        params = {"prompt": PROMPT, "kv_transfer_params": {"mine": 1}}
        second = await client.post("/v1/completions", json=params)
        assert (second.status_code, second.text) == (418, "answer")
        assert second.headers["content-type"].startswith("text/plain")
        assert second.headers["x-kvcr-engine"] == "http://b"
        assert second.headers["x-kvcr-source"] == "http://a"
        assert second.headers["x-kvcr-hinted-blocks"] == "2"
        (asked,) = stand_ins["b"].asked
        params = asked["kv_transfer_params"]
        payload = params["kv_hint"]["actions"][0]["payload"]
        assert payload["source_control_endpoint"] == "tcp://a:1"
        assert payload["block_hashes"] == [FIRST, SECOND]
        assert params["mine"] == 1
        assert "kv_transfer_params" not in stand_ins["a"].asked[0]
        stand_ins["a"].may_answer.set()
        assert (await first).headers["x-kvcr-source"] == ""

    check(tmp_path, body)


def test_work_counts_until_it_is_done_or_given_up(tmp_path) -> None:
    async def body(stand_ins: Any, client: httpx.AsyncClient, routed: Any) -> None:
        other = [-1] * 50
        request = await sent(client, stand_ins["a"], other)
        assert (await client.get("/health")).json() == {"http://a": 50, "http://b": 0}
        request.cancel()
        await asyncio.wait([request])
        assert (await client.get("/health")).json() == {"http://a": 0, "http://b": 0}
        for stand_in in stand_ins.values():
            stand_in.may_answer.set()
        for prompt in (other, "a text"):
            await client.post("/v1/completions", json={"prompt": prompt})
        assert (await client.get("/health")).json() == {"http://a": 0, "http://b": 0}

    check(tmp_path, body)


def test_an_engine_that_is_gone_is_named(tmp_path) -> None:
    async def body(stand_ins: Any, client: httpx.AsyncClient, routed: Any) -> None:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

        routed._http = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
        answer = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 502
        assert "http://a" in answer.text
        assert (await client.get("/health")).json() == {"http://a": 0, "http://b": 0}

    check(tmp_path, body)
