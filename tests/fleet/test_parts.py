# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make fleet`: which parts are run, and what their statuses come to."""

from unittest.mock import Mock

import pytest

from tests.fleet import __main__ as fleet


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Parts that only note that they ran; `ranks` fails."""
    parts = Mock()
    for name in fleet.PARTS:
        getattr(parts, name).return_value = int(name == "ranks")
    known = {name: (getattr(parts, name), "about") for name in fleet.PARTS}
    monkeypatch.setattr(fleet, "PARTS", known)
    return parts


def ran(parts: Mock) -> list[str]:
    return [name for name, *_ in parts.method_calls]


def test_all_parts_are_run_and_one_failure_is_the_whole_s(parts, capsys) -> None:
    assert fleet.main(["--starts", "3"]) == 1
    assert ran(parts) == ["router", "dynamo", "ranks", "guard", "first-contact"]
    assert parts.method_calls[-1].args == (["--starts", "3"],)
    printed = capsys.readouterr().out
    assert "== ranks: FAILED in" in printed
    assert "== guard: passed in" in printed


def test_parts_can_be_named_and_an_unknown_one_is_refused(parts) -> None:
    assert fleet.main(["guard", "router"]) == 0
    with pytest.raises(SystemExit):
        fleet.main(["guards"])
    assert ran(parts) == ["guard", "router"]
