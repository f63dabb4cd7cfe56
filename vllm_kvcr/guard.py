# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr guard``: start the KVCR service that a configuration needs.

Socket, digest and number of guards are read from the configuration that the engine is
given, so that the two agree. The service replaces this process: signals reach it, and
its exit status is the command's. Arguments after ``--`` are handed to it.
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
_LONGEST_SOCKET_PATH = 107  # what Linux takes for a Unix socket
_JOURNAL_BYTES = 100 << 20
"""What the service adds to each guard's pool for its journal."""


class CannotStart(Exception):
    """The service would not start, or not fit the engine; the text says why."""


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
        CannotStart: the configuration does not tell all that is needed.
    """
    for tier in setting.tiers:
        if tier.error is not None:
            raise CannotStart(tier.error)
    configs = [c for _, c in setting.valid if c.kvcr_service_socket_path is not None]
    if len(configs) != 1:
        raise CannotStart(
            f"{len(configs)} kvcr tiers with kvcr_service_socket_path in --config, and "
            "exactly one is needed; set that option to where the service shall listen"
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
        *("-m", "kvcr.kvcr_service"),
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
    """Bytes of each guard's pool, whole pages.

    Raises:
        CannotStart: neither a size nor chunks and their size are known.
    """
    if size is None and slots is None and config.secondary_g2_bytes:
        size = config.secondary_g2_bytes
    if size is None:
        slots = slots or config.secondary_g2_slots
        if not slots or chunk_bytes is None:
            raise CannotStart(
                "how large shall each guard's pool be? give --pool-size, such as "
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
            "compatibility_digest is 'auto' and namespace is too: what an engine makes "
            "of that follows from its model. Give namespace a text of your own, such "
            "as the model's name and revision, which this command and the engine "
            "turn into the same digest; or give --digest with the one that the engine "
            "quotes when it is refused"
        )
    return digest


def check_room(command: Sequence[str], pool_dir: Path) -> None:
    """Refuse what the service would find out after it has filled the memory.

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
            f"each, do not fit in the {free:,} bytes that are free in {pool_dir}; make "
            "them smaller, or enlarge it"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr guard",
        description="Start the KVCR service with the socket, digest and guards that a "
        "configuration names. Arguments after -- go to the service.",
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
        help="of each guard's pool: bytes, or with KiB, MiB, GiB, TiB",
    )
    parser.add_argument("--chunk-bytes", metavar="N", type=_size, help="of one chunk")
    parser.add_argument(
        "--slots",
        metavar="N",
        type=int,
        help="chunks of each guard's pool, instead of --pool-size; by default "
        "secondary_g2_slots",
    )
    parser.add_argument(
        "--digest", help="instead of what the configuration says or implies"
    )
    parser.add_argument(
        "--pool-dir",
        default="/dev/shm",
        help="a folder in memory that the engine sees, too (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the service's command only"
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
