# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The control channel between KVCR and its peers, bounded and checked.

Wraps the channel that KVCR supplies, which listens; what is sent goes through
``Connections``. Each message tells which releases its sender runs (``greeting``). KVCR
sees no message of a peer that runs other releases: that peer gets a refusal instead,
which ends its pull at once.

Threading: KVCR calls ``send``, ``recv`` and ``close`` on its progress thread.
``is_incompatible`` may be called from any.

Failure model: nothing raises that KVCR's own channel would not raise. A message that
cannot be sent, or may not be seen, costs its sender a pull.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import look_around
from vllm.v1.kv_offload.tiering.kvcr.peers import greeting
from vllm.v1.kv_offload.tiering.kvcr.peers.connections import Connections
from vllm.v1.kv_offload.tiering.kvcr.peers.greeting import Envelope, Message, Versions

logger = init_logger(__name__)

INCOMPATIBLE_S = 60.0
"""How long a peer of other releases is left alone: it may be upgraded meanwhile."""
_MAX_INCOMPATIBLE = 128
_MAX_LOGGED = 16
_LOG_INTERVAL_S = 60.0

_INTRODUCTION = "target_metadata"
_INTRODUCTION_SEEN = "target_metadata_ack"
_PULL = "start_write"
_PROBE = "write_probe"
_REFUSAL = "write_refused"


class PeerChannel:
    """See above; ``KVCRBindings.framework_control``.

    Args:
        listening: KVCR's channel.
        envelope: What is added to messages and expected of them.
    """

    def __init__(
        self,
        listening: Any,
        envelope: Envelope,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listening = listening
        self._envelope = envelope
        self._connections = Connections(self._closed)
        self._clock = clock
        self._forget: Callable[[str], None] = lambda endpoint: None
        self._answers: list[bytes] = []
        self._incompatible: OrderedDict[str, float] = OrderedDict()
        self._logged_versions: set[Versions] = set()
        self._unauthentic = 0
        self._unauthentic_logged_at = float("-inf")

    def __getattr__(self, name: str) -> Any:
        # Its endpoint, and what the KVCR service needs to share the listener.
        return getattr(self._listening, name)

    def when_closed(self, forget: Callable[[str], None]) -> None:
        """Have ``forget`` called with each endpoint whose connection was closed."""
        self._forget = forget

    def is_incompatible(self, endpoint: str) -> bool:
        """Whether a peer lately said that it runs other releases."""
        until = self._incompatible.get(endpoint)
        return until is not None and self._clock() < until

    # --- what KVCR calls -------------------------------------------------------------

    def send(self, endpoint: str, message: bytes) -> bool:
        read = greeting.read(message)
        if read is None:
            return False
        if read.type == _PROBE and self._withdraw(endpoint, read.op_handle):
            return True
        if read.type in (_INTRODUCTION, _PULL) and self.is_incompatible(endpoint):
            return False
        return self._connections.send(
            endpoint,
            self._envelope.seal(message),
            write=read.op_handle if read.type == _PULL else None,
            pulls=read.type in (_PULL, _PROBE),
            once=read.type == _INTRODUCTION,
        )

    def recv(self) -> list[bytes]:
        self._connections.flush()
        messages = [m for m in self._listening.recv() if self._may_be_seen(m)]
        if self._answers:
            messages += self._answers
            self._answers = []
        return messages

    def close(self) -> None:
        try:
            self._connections.close()
        finally:
            self._listening.close()

    # --- inside ----------------------------------------------------------------------

    def _may_be_seen(self, message: bytes) -> bool:
        read = greeting.read(message)
        if read is None:
            return False
        if not self._envelope.is_authentic(message):
            self._count_unauthentic(read)
            return False
        theirs = read.vllm_kvcr
        if theirs is not None and not self._envelope.versions.fits(theirs):
            return self._of_other_releases(read, theirs)
        # KVCR remembers whoever says so; who was not introduced to has no reason to.
        return read.type != _INTRODUCTION_SEEN or (
            (read.sender_control_endpoint or "") in self._connections
        )

    def _of_other_releases(self, read: Message, theirs: Versions) -> bool:
        sender = read.sender_control_endpoint or ""
        logged = self._logged_versions
        if theirs not in logged and len(logged) < _MAX_LOGGED:
            logged.add(theirs)
            logger.warning(
                "kvcr tier: the peer at %.80s runs %.80s, this engine runs %s. They "
                "exchange no blocks until both run the same; hints that name such "
                "peers are ignored (incompatible_peer)",
                sender,
                theirs,
                self._envelope.versions,
            )
        if read.type == _REFUSAL:
            if sender in self._connections:
                self._mark(sender)
            # It ends the pull that was refused, and names no memory.
            return True
        if sender and read.source_control_endpoint:
            self._refuse(sender, read)
        return False

    def _refuse(self, sender: str, read: Message) -> None:
        """Say that nothing was, or will be, written for this message."""
        # A probe asks about a write of whoever had this endpoint before: no answer.
        write = read.op_handle if read.type == _PULL else None
        refusal = _refusal(str(read.source_control_endpoint), write)
        self._connections.send(sender, self._envelope.seal(refusal))

    def _mark(self, endpoint: str) -> None:
        self._incompatible[endpoint] = self._clock() + INCOMPATIBLE_S
        self._incompatible.move_to_end(endpoint)
        if len(self._incompatible) > _MAX_INCOMPATIBLE:
            self._incompatible.popitem(last=False)

    def _withdraw(self, endpoint: str, write: int | None) -> bool:
        """Settle a write that was never asked for, instead of probing for its end."""
        if write is None or not self._connections.withdraw(endpoint, write):
            return False
        self._answers.append(_refusal(endpoint, write))
        return True

    def _closed(self, endpoint: str, writes: list[int]) -> None:
        self._answers += [_refusal(endpoint, write) for write in writes]
        self._forget(endpoint)

    def _count_unauthentic(self, read: Message) -> None:
        self._unauthentic += 1
        now = self._clock()
        if now - self._unauthentic_logged_at < _LOG_INTERVAL_S:
            return
        self._unauthentic_logged_at = now
        logger.warning(
            "kvcr tier: %d control messages without the secret of control_secret_file "
            "were ignored, the last in the name of %.80s; every peer needs the same",
            self._unauthentic,
            read.sender_control_endpoint or "an unknown peer",
        )
        self._unauthentic = 0


def guard_channel(channel: Any, secret: bytes | None) -> Any:
    """``channel`` with what is said above around it.

    What neither sends nor receives, as a stand-in for KVCR's, is returned as it is.
    """
    if not (hasattr(channel, "send") and hasattr(channel, "recv")):
        return channel
    installed = look_around().versions
    versions = Versions(installed.get("kvcr", ""), installed.get("nixl", ""))
    return PeerChannel(channel, Envelope(versions, secret))


def _refusal(source: str, write: int | None) -> bytes:
    """KVCR's message for: this write of ``source`` was not begun and will not be."""
    return msgspec.msgpack.encode(
        {"type": _REFUSAL, "sender_control_endpoint": source, "op_handle": write}
    )
