# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The dashboard and the alerts, checked against real servers and a real Prometheus.

Two servers run on the CPU: one with a small pool over a file, which pulls from the
other. A Prometheus scrapes both while they answer prompts. Then each query of
``dashboards/kvcr.json`` has to return data, promtool has to accept the metrics and the
alerts, and what the tier counted has to equal what vLLM counted.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.dashboard import DASHBOARD
from scripts.prometheus import Prometheus, PrometheusFailed, programs, promtool
from vllm_kvcr.demo_model import CHUNK_BYTES, make_prompts, write_model
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.peers_run import hint_at
from vllm_kvcr.ports import LOCALHOST, free_ports
from vllm_kvcr.routing import fetch_hint
from vllm_kvcr.servers import Server, ServerFailed, longest

ROOT = DASHBOARD.parent.parent
ALERTS = DASHBOARD.with_name("alerts.yml")
ALERTS_TEST = DASHBOARD.with_name("alerts_test.yml")
UNPACKED = Path(sys.prefix) / "prometheus"

WORKLOAD = Workload(prompts=20, chunks_per_prompt=4)
FOREIGN = 4
"""Of the prompts, those that only the other server has computed."""
POOL_CHUNKS = 24
FILE_CHUNKS = 96
STEP_S = 1.0
SETTLE_S = 5.0
# promtool's one rule that vLLM's names break.
VLLMS_COLON = "should not contain ':'"


class Run:
    """Servers and a Prometheus that have run for a while, and still do."""

    def __init__(self, prometheus: Prometheus, started: float, texts: list[str]):
        self.prometheus = prometheus
        self.started = started
        self.ended = time.time()
        self.metrics = texts

    def expression(self, expression: str) -> str:
        """A panel's query, with Grafana's variables as this run has them."""
        seconds = math.ceil(self.ended - self.started)
        return (
            expression.replace("$__rate_interval", "10s")
            .replace("$__range", f"{seconds}s")
            .replace("$instance", ".*")
        )

    def series(self, target: dict[str, Any]) -> list[dict[str, Any]]:
        """What a panel shows: for each series its labels and its numbers."""
        expression = self.expression(target["expr"])
        if target["instant"]:
            found = self.prometheus.query(expression)
            return [
                {"labels": each["metric"], "points": numbers([each["value"]])}
                for each in found
            ]
        found = self.prometheus.query_range(
            expression, self.started, self.ended, STEP_S
        )
        return [
            {"labels": each["metric"], "points": numbers(each["values"])}
            for each in found
        ]


def numbers(values: list[list[Any]]) -> list[tuple[float, float]]:
    points = [(float(at), float(value)) for at, value in values]
    return [point for point in points if math.isfinite(point[1])]


def drive(a: Server, b: Server, events: Subscription) -> None:
    """Have everything happen that the dashboard shows, except for failures."""
    prompts = make_prompts(WORKLOAD)
    foreign, own = prompts[:FOREIGN], prompts[FOREIGN:]
    tokens = WORKLOAD.output_tokens
    for prompt in foreign:
        a.complete(prompt, tokens)
    for _ in range(2):
        for prompt in own:
            b.complete(prompt, tokens)
    for prompt in foreign:
        b.complete(prompt, tokens, hint_at(a, events, prompt, WORKLOAD))
        # The first of them only introduces the two to each other.
        time.sleep(1)
    # What was stored last is in the pool.
    for prompt in own[-6:-3] + own[-6:-3]:
        b.complete(prompt, tokens)
    b.complete(own[0], tokens, fetch_hint(f"tcp://[::1]:{a.control_ports[0]}", [1]))


def faults_of_queries(run: Run) -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            queries += 1
            if not any(series["points"] for series in run.series(target)):
                yield f"no data: {panel['title']}: {run.expression(target['expr'])}"
    print(f"  {queries} queries of {DASHBOARD.name} were run")


def faults_of_alerts(run: Run) -> Iterator[str]:
    rules = run.prometheus.rules()
    for rule in rules:
        if rule["health"] != "ok":
            yield f"alert {rule['name']}: {rule.get('lastError')}"
        # That of hints has one to tell of; it waits for more.
        if rule["state"] == "firing":
            yield f"alert {rule['name']} fires although all is well"
    print(f"  {len(rules)} alerts were evaluated")


def faults_of_metrics(run: Run, tool: Path) -> Iterator[str]:
    complaints = 0
    for text in run.metrics:
        _, said = promtool(tool, "check", "metrics", given=text)
        for line in said.splitlines():
            about_ours = line.startswith("vllm:kvcr_")
            failed = line.startswith("error")
            if failed or (about_ours and VLLMS_COLON not in line):
                yield f"promtool check metrics: {line}"
            complaints += not about_ours
    print(f"  promtool check metrics: {complaints} lines on metrics of others")


def faults_of_counts(a: Server, b: Server) -> Iterator[str]:
    """What the tier counted against what vLLM did."""
    tier = "vllm:kvcr_tier_"
    for server in (a, b):
        seen = server.metrics()
        for direction, vllms in (("load", "read"), ("store", "write")):
            # Blocks that moved on to a file are not stored twice.
            places = ("dram", "disk", "peer") if direction == "load" else ("dram",)
            ours = sum(
                seen.total(f"{tier}moved_bytes_total", direction=direction, place=place)
                for place in places
            )
            theirs = seen.total(f"vllm:kv_offload_tiering_{vllms}_bytes_total")
            if ours != theirs or ours % CHUNK_BYTES:
                yield f"{server.name}: {direction} of {ours} bytes; vLLM: {theirs}"
        hits = seen.total(f"{tier}hits_total")
        asked = seen.total(f"{tier}requested_blocks_total", direction="load")
        if hits != asked:
            yield f"{server.name}: {hits} hits, {asked} blocks to be loaded"
    seen = b.metrics()
    for place in ("dram", "disk", "peer"):
        hits = seen.total(f"{tier}hits_total", place=place)
        moved = seen.total(f"{tier}moved_blocks_total", direction="load", place=place)
        print(f"  {place}: {hits} hits, {moved} blocks loaded")
        if not hits:
            yield f"nothing was found in {place}"
    for source in ("host", "disk", "p2p"):
        tokens = seen.total("vllm:prompt_tokens_cached_by_source_total", source=source)
        print(f"  vLLM counts {tokens} cached tokens from {source}")
        if not tokens:
            yield f"vLLM counts no cached tokens from {source}"


def run(folder: Path, picture: Path | None) -> list[str]:
    """Run all of it; what is wrong."""
    tools = programs(UNPACKED)
    print("starting two servers")
    model = folder / "model"
    write_model(model, longest(WORKLOAD.chunks_per_prompt))
    files = {"paths": str(folder / "g3.data")}
    tier = {
        "secondary_g2_slots": POOL_CHUNKS,
        "g3": {**files, "capacity_bytes_per_file": FILE_CHUNKS * CHUNK_BYTES},
    }
    chunks = WORKLOAD.chunks_per_prompt
    with ExitStack() as stack:
        a = stack.enter_context(Server("a", folder, model, chunks=chunks))
        b = stack.enter_context(Server("b", folder, model, chunks=chunks, tier=tier))
        events = stack.enter_context(Subscription(a.events_endpoint))
        a.wait_until_ready()
        b.wait_until_ready()
        targets = {server.name: server.port for server in (a, b)}
        prometheus = stack.enter_context(
            Prometheus(tools["prometheus"], folder, free_ports(1)[0], targets, [ALERTS])
        )
        print(f"Prometheus scrapes {LOCALHOST}: {targets}; they answer prompts")
        started = time.time()
        drive(a, b, events)
        time.sleep(SETTLE_S)
        done = Run(prometheus, started, [a.metrics_text(), b.metrics_text()])
        status, said = promtool(tools["promtool"], "test", "rules", str(ALERTS_TEST))
        faults = [said] if status else []
        faults += faults_of_queries(done)
        faults += faults_of_alerts(done)
        faults += faults_of_metrics(done, tools["promtool"])
        faults += faults_of_counts(a, b)
        if picture is not None:
            from scripts import dashboard_picture

            dashboard_picture.draw(done, picture)
            print(f"wrote {picture}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--picture", type=Path, help="draw the dashboard into this SVG, with matplotlib"
    )
    options = parser.parse_args()
    if options.picture is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install -e .[bench]")
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-kvcr-dashboards-") as folder:
            faults = run(Path(folder), options.picture)
    except (PrometheusFailed, ServerFailed) as failure:
        faults = [str(failure)]
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    if not faults:
        print("Every query returns data, and every count agrees.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
