# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The check of first contacts: what it counts, and when it fails. None is started."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.fleet import first_contact
from tests.fleet.first_contact import WORKLOAD, Contact
from vllm_kvcr.servers import Answer, ServerFailed

TOKENS = WORKLOAD.prompt_tokens
COMPUTED = Answer((1,), TOKENS, 0, 2.0)
SERVED = Answer((1,), TOKENS, TOKENS - WORKLOAD.tail_tokens, 0.2)

AT_ONCE = Contact(WORKLOAD, (COMPUTED, COMPUTED), (SERVED, SERVED))
AT_SECOND = replace(AT_ONCE, hinted=(COMPUTED, SERVED))
NEVER = replace(AT_ONCE, hinted=(COMPUTED, COMPUTED))
UNEQUAL = replace(AT_ONCE, hinted=(SERVED, replace(SERVED, token_ids=(2,))))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def check(*outcomes: Contact | Exception) -> int:
        monkeypatch.setattr(first_contact, "contact", Mock(side_effect=outcomes))
        return first_contact.main(["--starts", str(len(outcomes))])

    return check


def test_the_second_prompt_has_to_be_served_each_time(check, capsys) -> None:
    assert check(AT_ONCE, AT_SECOND, AT_SECOND) == 0
    printed = capsys.readouterr().out
    assert "start 2 (0 s): 0 of 2,056 tokens from A in 2.0 s; 2,048 of" in printed
    assert "first prompt at 1 of 3 starts, the second at 3." in printed


@pytest.mark.parametrize("outcome", [NEVER, UNEQUAL, ServerFailed("gave up")])
def test_one_bad_start_fails_the_check(check, outcome: Contact | Exception) -> None:
    assert check(AT_ONCE, outcome, AT_ONCE) == 1
