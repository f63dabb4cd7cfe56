# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr guard``: start the KVCR service that a configuration needs.

The socket, the digest and the number of guards come from the engine's configuration, so
that service and engine agree. The service replaces this process, so signals reach it
and its exit status is the command's. Arguments after ``--`` are passed to it.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from decimal import Decimal
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvcr.doctor.setting import Setting, UnreadableConfig, read_json

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

_GIB = 1 << 30
_UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": _GIB, "TIB": 1 << 40}
_LONGEST_SOCKET_PATH = 107  # Linux's limit for a Unix socket
_JOURNAL_BYTES = 100 << 20
"""The journal that the service adds to each guard's pool."""


class CannotStart(Exception):
    """The service would not start, or would not fit the engine; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        setting = Setting(read_json(given.config, "--config"))
        command = service_command(setting, given)
        check_room(command, Path(given.pool_dir))
    except (CannotStart, UnreadableConfig) as error:
        print(f"vllm-kvcr guard: {error}", file=sys.stderr)
        return 1
    print(shlex.join(["python", *command[1:]]), file=sys.stderr, flush=True)
    if not given.dry_run:
        os.execv(command[0], command)
    return 0


def service_command(setting: Setting, given: argparse.Namespace) -> list[str]:
    """The service's command line for this configuration.

    Raises:
        CannotStart: the configuration lacks something that is needed.
    """
    for tier in setting.tiers:
        if tier.error is not None:
            raise CannotStart(tier.error)
    configs = [c for _, c in setting.valid if c.kvcr_service_socket_path is not None]
    if len(configs) != 1:
        raise CannotStart(
            f"there are {len(configs)} kvcr tiers with kvcr_service_socket_path, but "
            "exactly one is needed; set that option to the socket of the service"
        )
    (config,) = configs
    pool = pool_bytes(config, given.pool_size, given.slots, given.chunk_bytes)
    socket = config.kvcr_service_socket_path or ""
    if len(os.fsencode(os.path.abspath(socket))) > _LONGEST_SOCKET_PATH:
        raise CannotStart(
            f"kvcr_service_socket_path {socket} is longer than "
            f"{_LONGEST_SOCKET_PATH} bytes; give a shorter one"
        )
    return [
        sys.executable,
        *("-m", "vllm_kvcr.service"),
        *("--nixl-progress-delay-ms", str(config.nixl_progress_delay_ms)),
        *("--socket-path", socket),
        *("--pool-dir", given.pool_dir),
        *("--guard-count", str(len(config.control_ports or ()))),
        *("--pool-sizes-gb", f"{Decimal(pool) / _GIB:f}"),
        *("--compatibility-digest", given.digest or _digest(config)),
        *given.more,
    ]


def pool_bytes(
    config: "TierConfig", size: int | None, slots: int | None, chunk_bytes: int | None
) -> int:
    """Bytes of each guard's pool, rounded up to whole pages.

    Raises:
        CannotStart: neither the pool's size nor chunks and their size are given.
    """
    if size is None and slots is None and config.secondary_g2_bytes:
        size = config.secondary_g2_bytes
    if size is None:
        slots = slots or config.secondary_g2_slots
        if not slots or chunk_bytes is None:
            raise CannotStart(
                "the size of each guard's pool is not known; give --pool-size, such as "
                "64GiB, or --chunk-bytes together with --slots or secondary_g2_slots"
            )
        size = slots * chunk_bytes
    elif chunk_bytes is not None:
        # The rest would never be used.
        size -= size % chunk_bytes
    size = -(-size // PAGESIZE) * PAGESIZE
    if not size:
        raise CannotStart(
            f"--pool-size is smaller than one chunk of {chunk_bytes} bytes"
        )
    return size


def _digest(config: "TierConfig") -> str:
    from vllm_kvcr.doctor.guard import digest_of

    digest = digest_of(config)
    if digest is None:
        raise CannotStart(
            "compatibility_digest and namespace are both 'auto', so the engine derives "
            "the digest from its model, which is not known here. Set namespace to a "
            "text, such as the model's name and revision, from which both derive "
            "the same digest; or give --digest with the one that the engine quotes "
            "when it is refused"
        )
    return digest


def check_room(command: Sequence[str], pool_dir: Path) -> None:
    """Refuse what the service would notice only after it has filled the memory.

    Raises:
        CannotStart: the pools do not fit, or a folder is missing.
    """
    told = dict(zip(command[3::2], command[4::2], strict=False))
    guards = int(told["--guard-count"])
    pool = int(Decimal(told["--pool-sizes-gb"]) * _GIB)
    needed = guards * (pool + _JOURNAL_BYTES)
    folder = Path(told["--socket-path"]).parent
    if not folder.is_dir():
        raise CannotStart(f"the socket's folder {folder} does not exist; create it")
    if not pool_dir.is_dir():
        raise CannotStart(f"--pool-dir {pool_dir} does not exist; create it")
    free = shutil.disk_usage(pool_dir).free
    if needed > free:
        raise CannotStart(
            f"{guards} pools of {pool:,} bytes, with a journal of {_JOURNAL_BYTES:,} "
            f"bytes each, do not fit into the {free:,} bytes that are free in "
            f"{pool_dir}; make the pools smaller, or the folder larger"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr guard",
        description="Start the KVCR service with the socket, digest and guards of a "
        "configuration. Arguments after -- go to the service.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE|JSON",
        required=True,
        help="what vLLM is given as --kv-transfer-config",
    )
    parser.add_argument(
        "--pool-size",
        metavar="SIZE",
        type=_size,
        help="size of each guard's pool: bytes, or with KiB, MiB, GiB, TiB",
    )
    parser.add_argument(
        "--chunk-bytes", metavar="N", type=_size, help="size of one chunk"
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=int,
        help="size of each guard's pool in chunks, instead of --pool-size (default: "
        "secondary_g2_slots)",
    )
    parser.add_argument(
        "--digest", help="use this digest instead of the configuration's"
    )
    parser.add_argument(
        "--pool-dir",
        default="/dev/shm",
        help="a folder in memory that the engine can see, too (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the service's command"
    )
    parser.add_argument("more", nargs="*", metavar="-- ARGUMENTS")
    return parser


def _size(text: str) -> int:
    number, factor = text.strip().upper(), 1
    for unit, bytes_ in _UNITS.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), bytes_
    try:
        value = int(Decimal(number.strip()) * factor)
    except ArithmeticError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size") from error
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


if __name__ == "__main__":
    sys.exit(main())
