# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make fleet`: which parts are run, and what their statuses come to."""

from collections.abc import Sequence

import pytest

from tests.fleet import __main__ as fleet


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Parts that only note that they ran; `ranks` fails."""
    ran: list[tuple[str, list[str]]] = []

    def part(name: str):
        def run(arguments: Sequence[str]) -> int:
            ran.append((name, list(arguments)))
            return int(name == "ranks")

        return run

    parts = {name: (part(name), text) for name, (_, text) in fleet.PARTS.items()}
    monkeypatch.setattr(fleet, "PARTS", parts)
    return ran


def test_all_parts_are_run_and_one_failure_is_the_whole_s(ran, capsys) -> None:
    assert fleet.main(["--starts", "3"]) == 1
    assert [name for name, _ in ran] == ["router", "ranks", "guard", "first-contact"]
    assert dict(ran)["first-contact"] == ["--starts", "3"]
    printed = capsys.readouterr().out
    assert "== ranks: FAILED in" in printed
    assert "== guard: passed in" in printed


def test_parts_can_be_named(ran) -> None:
    assert fleet.main(["guard", "router"]) == 0
    assert [name for name, _ in ran] == ["guard", "router"]


def test_an_unknown_part_is_refused(ran) -> None:
    with pytest.raises(SystemExit):
        fleet.main(["guards"])
    assert ran == []
