# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes what can be read off the tier's options: their reference and a JSON schema.

    python -m scripts.options_reference

Run it after each change to an option or to what is said of one; a test fails where
that was forgotten.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from vllm_kvcr.plugin import register

register()

from vllm.v1.kv_offload.tiering.kvcr.config import (  # noqa: E402
    G3Config,
    TierConfig,
)

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "vllm_kvcr" / "options.schema.json"
BEGIN = "<!-- written by scripts/options_reference.py, from here -->\n"
END = "<!-- to here -->\n"

# The first option of each section.
SECTIONS = {
    "control_ports": "Peers",
    "secondary_g2_slots": "Storage",
    "operation_timeout_ms": "Limits",
    "namespace": "The rest",
}
_HEAD = "| option | default | meaning |\n|---|---|---|\n"


def reference() -> str:
    """The tables of the reference."""
    parts = []
    for name, field in TierConfig.model_fields.items():
        if name in SECTIONS:
            parts.append(f"\n## {SECTIONS[name]}\n\n{_HEAD}")
        parts.append(_row(name, field))
    parts.append(f"\n## Files\n\n`g3` is a mapping:\n\n{_HEAD}")
    parts += [_row(f"g3.{name}", f) for name, f in G3Config.model_fields.items()]
    return "".join(parts) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    assert field.description, f"{name} has no docstring"
    meaning = " ".join(field.description.replace("``", "`").split())
    meaning = meaning[0].lower() + meaning[1:] if meaning[1].islower() else meaning
    default = "required" if field.is_required() else _shown(field.default)
    return f"| `{name}` | {default} | {meaning.removesuffix('.')} |\n"


def _shown(default: Any) -> str:
    if default is None:
        return "\N{EN DASH}"
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`"


def schema() -> str:
    """A JSON schema of a tier's entry in ``secondary_tiers``."""
    made = TierConfig.model_json_schema()
    for each in _objects(made):
        if isinstance(each.get("title"), str):
            del each["title"]
        if isinstance(each.get("description"), str):
            each["description"] = " ".join(each["description"].split())
    made["properties"] = {
        "type": {"const": "kvcr"},
        "module_path": {"type": "string", "description": "vLLM's, for every tier."},
        "backpressure": {"type": "object", "description": "vLLM's, for every tier."},
        **made["properties"],
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A kvcr tier in vLLM's secondary_tiers",
        **made,
        "required": ["type"],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


def written(page: str) -> str:
    """The reference's page, with its tables as they should be."""
    between = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    assert between.search(page), f"{REFERENCE} has lost its marks"
    return between.sub(lambda _: reference(), page)


def main() -> None:
    REFERENCE.write_text(written(REFERENCE.read_text()))
    SCHEMA.write_text(schema())


if __name__ == "__main__":
    main()
