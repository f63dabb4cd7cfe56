# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The control channel between KVCR and its peers, bounded and checked.

Wraps KVCR's own channel, which listens; outgoing messages go through ``Connections``.
Each message says which releases its sender runs (``greeting``). KVCR sees no messages
from a peer that runs different releases. That peer gets a refusal instead, which ends
its pull at once.

Threading: KVCR calls ``send``, ``recv`` and ``close`` on its progress thread.
``is_incompatible`` and ``is_lost`` may be called on any thread.

Failure model: nothing raises that KVCR's own channel would not raise. A message that
cannot be sent, or that KVCR may not see, costs its sender a pull.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import installed
from vllm.v1.kv_offload.tiering.kvcr.peers import greeting
from vllm.v1.kv_offload.tiering.kvcr.peers.connections import Connections
from vllm.v1.kv_offload.tiering.kvcr.peers.greeting import Envelope, Message, Versions

logger = init_logger(__name__)

INCOMPATIBLE_S = 60.0
"""How long a peer with different releases is left alone; it may be upgraded soon."""
_MAX_INCOMPATIBLE = 128
_MAX_LOGGED = 16
_LOG_INTERVAL_S = 60.0

_INTRODUCTION = "target_metadata"
_INTRODUCTION_SEEN = "target_metadata_ack"
_PULL = "start_write"
_PROBE = "write_probe"
_REFUSAL = "write_refused"


class PeerChannel:
    """``KVCRBindings.framework_control``, around KVCR's own; see above."""

    def __init__(self, listening: Any, envelope: Envelope) -> None:
        self._listening = listening
        self._envelope = envelope
        self._connections = Connections(self._closed)
        self.is_lost = self._connections.is_lost
        self.heard_at = float("-inf")
        """When a message last arrived. May be read on any thread."""
        self.forget: Callable[[str], None] = lambda endpoint: None
        """Called with each endpoint whose connection is closed; the owner's to set."""
        self._answers: list[bytes] = []
        self._incompatible: OrderedDict[str, float] = OrderedDict()
        self._logged: set[Versions] = set()
        self._unauthentic = 0
        self._unauthentic_logged_at = float("-inf")

    def __getattr__(self, name: str) -> Any:
        # The endpoint, and what the KVCR service needs to share the listener.
        return getattr(self._listening, name)

    def is_incompatible(self, endpoint: str) -> bool:
        """Whether a peer has said recently that it runs different releases."""
        until = self._incompatible.get(endpoint)
        return until is not None and time.monotonic() < until

    def send(self, endpoint: str, message: bytes) -> bool:
        read = greeting.read(message)
        if read is None:
            return False
        probed = read.op_handle if read.type == _PROBE else None
        if probed is not None and self._connections.withdraw(endpoint, probed):
            # Its request never left, so it is settled without the peer.
            self._answers.append(_refusal(endpoint, probed))
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
        if messages:
            self.heard_at = time.monotonic()
        messages += self._answers
        self._answers.clear()
        return messages

    def close(self) -> None:
        try:
            self._connections.close()
        finally:
            self._listening.close()

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
        # KVCR remembers every sender of an acknowledgement, so only peers to which an
        # introduction was sent may send one.
        return read.type != _INTRODUCTION_SEEN or (
            (read.sender_control_endpoint or "") in self._connections
        )

    def _of_other_releases(self, read: Message, theirs: Versions) -> bool:
        sender = read.sender_control_endpoint or ""
        if theirs not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(theirs)
            logger.warning(
                "kvcr tier: the peer at %.80s runs %.80s, but this engine runs %s. "
                "They exchange no blocks until both run the same; hints that name "
                "such peers are ignored (incompatible_peer)",
                sender,
                theirs,
                self._envelope.versions,
            )
        if read.type == _REFUSAL:
            if sender in self._connections:
                self._incompatible[sender] = time.monotonic() + INCOMPATIBLE_S
                self._incompatible.move_to_end(sender)
                if len(self._incompatible) > _MAX_INCOMPATIBLE:
                    self._incompatible.popitem(last=False)
            # KVCR may see a refusal: it ends the refused pull and names no memory.
            return True
        if sender and read.source_control_endpoint:
            # Say that nothing was, or will be, written. A probe is not answered: it is
            # about a write of an earlier engine at this endpoint.
            write = read.op_handle if read.type == _PULL else None
            refusal = _refusal(read.source_control_endpoint, write)
            self._connections.send(sender, self._envelope.seal(refusal))
        return False

    def _closed(self, endpoint: str, writes: list[int]) -> None:
        self._answers += [_refusal(endpoint, write) for write in writes]
        self.forget(endpoint)

    def _count_unauthentic(self, read: Message) -> None:
        self._unauthentic += 1
        now = time.monotonic()
        if now - self._unauthentic_logged_at < _LOG_INTERVAL_S:
            return
        self._unauthentic_logged_at = now
        logger.warning(
            "kvcr tier: ignored %d control messages that were not signed with the "
            "secret in control_secret_file, the last one sent as %.80s; all peers need "
            "the same secret",
            self._unauthentic,
            read.sender_control_endpoint or "an unknown peer",
        )
        self._unauthentic = 0


def guard_channel(channel: Any, secret: bytes | None) -> Any:
    """Wrap ``channel``, unless it is a stand-in that can neither send nor receive."""
    if not (hasattr(channel, "send") and hasattr(channel, "recv")):
        return channel
    found = installed()
    versions = Versions(found.get("kvcr", ""), found.get("nixl", ""))
    return PeerChannel(channel, Envelope(versions, secret))


def _refusal(source: str, write: int | None) -> bytes:
    """KVCR's message that says that a write of ``source`` will never start."""
    return msgspec.msgpack.encode(
        {"type": _REFUSAL, "sender_control_endpoint": source, "op_handle": write}
    )
