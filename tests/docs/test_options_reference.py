# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is generated from the options is up to date, and says what the tier does."""

import json
from typing import Any

import jsonschema
import pytest

from scripts import options_reference
from tests.docs.test_docs import tiers
from vllm.v1.kv_offload.tiering.kvcr.config import OptionError, parse_options

AGAIN = "stale; run python -m scripts.options_reference"
SCHEMA = json.loads(options_reference.SCHEMA.read_text())
POOL = {"type": "kvcr", "secondary_g2_slots": 8}
FILES = {"paths": "/nvme/kv", "capacity_bytes_per_file": "100GiB"}


def test_the_reference_is_up_to_date() -> None:
    page = options_reference.REFERENCE.read_text()
    assert page == options_reference.written(page), AGAIN


def test_the_schema_is_up_to_date() -> None:
    assert options_reference.SCHEMA.read_text() == options_reference.schema(), AGAIN


def test_the_schema_says_what_each_option_is_for() -> None:
    for name, described in SCHEMA["properties"].items():
        assert name == "type" or described["description"]


def taken_by_the_tier(tier: dict[str, Any]) -> bool:
    try:
        parse_options({name: v for name, v in tier.items() if name != "type"})
    except OptionError:
        return False
    return True


@pytest.mark.parametrize(
    "tier",
    [
        *tiers(),
        POOL,
        {"type": "kvcr", "secondary_g2_bytes": "64GiB"},
        {"type": "kvcr", "secondary_g2_bytes": 1 << 30, "max_inflight_bytes": "1G"},
        {"type": "kvcr", "secondary_g2_slots": "8", "control_ports": "24990, 24991"},
        {"type": "kvcr", "control_ports": 24990, "router_capabilities": "router_hint"},
        POOL | {"g3": FILES},
        POOL | {"g3": FILES | {"paths": [["/a"], ["/b"]]}},
        POOL | {"g3": FILES | {"backend_options": {"use_uring": True, "ios": 8}}},
        POOL | {"namespace": False, "locality": "LOCAL", "control_host": "127.0.0.1"},
    ],
)
def test_the_schema_takes_what_the_tier_takes(tier: dict[str, Any]) -> None:
    assert taken_by_the_tier(tier)
    jsonschema.validate(tier, SCHEMA)


@pytest.mark.parametrize(
    "more",
    [
        {"secondary_g2_slot": 8},
        {"secondary_g2_slots": -1},
        {"secondary_g2_slots": True},
        {"secondary_g2_bytes": "8GiBs"},
        {"control_ports": []},
        {"control_ports": 65536},
        {"control_ports": "24990;24991"},
        {"operation_timeout_ms": 0},
        {"locality": "NEAR"},
        {"remote_landing": "disk"},
        {"g3": "/nvme/kv"},
        {"g3": FILES | {"path": "/nvme/kv"}},
        {"g3": {"paths": "/nvme/kv"}},
        {"g3": FILES | {"backend_options": {"use_uring": None}}},
    ],
    ids=json.dumps,
)
def test_the_schema_refuses_what_the_tier_refuses(more: dict[str, Any]) -> None:
    tier = POOL | more
    assert not taken_by_the_tier(tier)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tier, SCHEMA)
