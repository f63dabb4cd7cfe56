# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm-kvcr hint`: from a prompt and an engine's events to what KVCR reads."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcr.hint_parser import _KVFetchHint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.vllm_kvcr.publishing import BOTH, FIRST, PROMPT, SECOND, Engine, stored
from vllm_kvcr import cli

SOURCE = "tcp://10.0.0.6:24990"
TOKENS = ",".join(map(str, PROMPT))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


def run(engine: Engine, *arguments: str) -> int:
    endpoints = ["--events", engine.events, "--source", SOURCE]
    return cli.main(["hint", *endpoints, *arguments])


def hashes(printed: str) -> frozenset[int]:
    """As KVCR reads them."""
    hint = _KVFetchHint.from_hint(json.loads(printed))
    assert hint.source_endpoint == SOURCE
    return hint.block_hashes


@pytest.mark.parametrize(
    "prompt",
    [
        ["--tokens", TOKENS],
        ["--tokens", json.dumps(PROMPT)],
        ["--tokens", "@prompt"],
        ["--text", " ".join(f"w{n}" for n in PROMPT), "--model", "model"],
    ],
    ids=["commas", "JSON", "file", "text"],
)
def test_a_prompts_hint_is_printed(engine, prompt, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompt").write_text(TOKENS + "\n")
    words = Tokenizer(WordLevel({f"w{n}": n for n in PROMPT}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("model")
    engine.publish(*BOTH)
    assert run(engine, *prompt, "--replay", engine.replay) == 0
    printed = capsys.readouterr()
    assert hashes(printed.out) == {FIRST, SECOND}
    assert f"2 blocks, 8 of 10 tokens, can be pulled from {SOURCE}" in printed.err


def test_without_a_replay_it_waits_for_the_engine_to_publish(engine, capsys) -> None:
    done = threading.Event()

    def publish() -> None:
        while not done.wait(0.1):
            engine.publish(*BOTH)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        assert run(engine, "--tokens", TOKENS) == 0
    finally:
        done.set()
        publisher.join()
    assert hashes(capsys.readouterr().out) == {FIRST, SECOND}


NOTHING = [stored(None, -1, [-1] * 4)]
ON_GPU = [stored(None, FIRST, PROMPT[:4], "GPU")]


@pytest.mark.parametrize(
    ("events", "arguments", "message"),
    [
        ([], ["--tokens", TOKENS], "self_describing_kv_events"),
        (NOTHING, ["--tokens", TOKENS], "first block"),
        (ON_GPU, ["--tokens", TOKENS], "are on the engine's GPU only"),
        ([], ["--tokens", "one"], "--tokens: invalid literal"),
        ([], ["--tokens", "@absent"], "--tokens: [Errno 2]"),
        ([], ["--text", "one"], "--text needs --model"),
        ([], ["--text", "one", "--model", "./absent"], "from ./absent"),
    ],
)
def test_why_there_is_no_hint(engine, events, arguments, message, capsys) -> None:
    engine.publish(*events)
    assert run(engine, *arguments, "--replay", engine.replay) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_an_endpoint_that_is_none(engine, capsys) -> None:
    assert run(engine, "--tokens", TOKENS, "--events", "nowhere") == 1
    assert "vllm-kvcr hint: nowhere: " in capsys.readouterr().err
