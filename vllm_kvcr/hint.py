# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr hint``: print the hint for a prompt, from an engine's KV events.

The output goes into another engine's request as ``kv_transfer_params["kv_hint"]``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.routing import BlockHash, fetch_hint

WAIT_SECONDS = 30.0
SETTLE_SECONDS = 1.0


class NoHint(Exception):
    """There is nothing to print; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        prompt = token_ids(given)
        hint = find(prompt, given)
    except NoHint as error:
        print(f"vllm-kvcr hint: {error}", file=sys.stderr)
        return 1
    print(json.dumps(hint, indent=2))
    return 0


def find(prompt: Sequence[int], given: argparse.Namespace) -> dict[str, object]:
    """The hint for all of the prompt's blocks that the engine is known to hold.

    Raises:
        NoHint: It is not known to hold any, or cannot be asked.
    """
    # What is replayed is all there is; live events are those that are yet to come.
    wait = given.wait if given.wait is not None else 0 if given.replay else WAIT_SECONDS
    try:
        with Subscription(given.events, replay=given.replay) as events:
            hashes = _wait_for_all(events, prompt, wait)
            size, held = events.index.block_tokens, events.index.held(prompt)
    except (TimeoutError, zmq.ZMQError) as error:
        raise NoHint(f"{given.events}: {error}") from error
    if not hashes:
        raise NoHint(_why_none(given, size, bool(held)))
    print(
        f"{len(hashes)} blocks, {len(hashes) * size} of {len(prompt)} tokens, can be "
        f"pulled from {given.source}",
        file=sys.stderr,
    )
    return fetch_hint(given.source, hashes)


def _wait_for_all(
    events: Subscription, prompt: Sequence[int], wait: float
) -> list[BlockHash]:
    """Blocks come one by one, and how many will come, nobody knows."""
    hashes = events.wait_for(prompt, 1, wait)
    while hashes:
        known = len(hashes) * events.index.block_tokens
        more = events.wait_for(prompt, known + 1, min(wait, SETTLE_SECONDS))
        if len(more) <= len(hashes):
            return more
        hashes = more
    return hashes


def _why_none(given: argparse.Namespace, size: int, held: bool) -> str:
    if not size:
        return (
            f"no event from {given.events} told a block's tokens. The engine needs "
            '"self_describing_kv_events": true in its kv_connector_extra_config, and '
            "publishes only what is stored or removed: send the prompt to it while "
            "this waits, or give --replay with its replay_endpoint"
        )
    if held:
        return (
            "the prompt's first blocks are on the engine's GPU only; peers pull from "
            "its primary tier and from KVCR"
        )
    return (
        "the engine is not known to hold the prompt's first block. It may have been "
        "evicted, stored before this began to listen (give --replay), or the prompt "
        f"may be shorter than a block of {size} tokens"
    )


def token_ids(given: argparse.Namespace) -> list[int]:
    """The prompt as the engine sees it.

    Raises:
        NoHint: It cannot be read, or there is no tokenizer for it.
    """
    if given.text is None:
        return _numbers(given.tokens)
    if given.model is None:
        raise NoHint("--text needs --model, whose tokenizer makes token ids of it")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.model)
    except (ImportError, OSError, ValueError) as error:
        raise NoHint(
            f"no tokenizer could be loaded from {given.model} ({error}); give the "
            "prompt's token ids with --tokens"
        ) from error
    return list(tokenizer.encode(given.text))


def _numbers(text: str) -> list[int]:
    try:
        if text.startswith("@"):
            text = sys.stdin.read() if text == "@-" else Path(text[1:]).read_text()
        return [int(word) for word in text.strip(" \n[]").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise NoHint(f"--tokens: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr hint",
        description="Print the hint for a prompt, from an engine's KV events. It goes "
        'into another engine\'s request as kv_transfer_params["kv_hint"].',
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--tokens",
        metavar="IDS|@FILE",
        help="the prompt's token ids, separated by commas or blanks, or a file with "
        "them (@- reads standard input)",
    )
    prompt.add_argument("--text", help="the prompt, as sent to /v1/completions")
    parser.add_argument("--model", help="with --text: whose tokenizer to use")
    parser.add_argument(
        "--events",
        required=True,
        metavar="ENDPOINT",
        help="where the engine publishes, such as tcp://10.0.0.6:5557",
    )
    parser.add_argument(
        "--replay",
        metavar="ENDPOINT",
        help="the engine's replay_endpoint, such as tcp://10.0.0.6:5558; without it "
        "only what is published from now on is known",
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="ENDPOINT",
        help="the engine's control endpoint, such as tcp://10.0.0.6:24990",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help=f"how long to wait for events (default: {WAIT_SECONDS:.0f}, and 0 with "
        "--replay)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
