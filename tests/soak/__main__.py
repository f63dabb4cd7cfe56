# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Random faults for as long as asked, from a seed that is printed; see ``Soak``."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from vllm_kvcr.plugin import register

register()

from tests.soak.soak import Soak  # noqa: E402

LONGEST_S = 6 * 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    if not 0 < options.seconds <= LONGEST_S:
        parser.error(f"--seconds must be positive and at most {LONGEST_S:.0f}")
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.seconds:.0f} s", flush=True)
    # Not /tmp, which may be memory: KVCR's files want direct I/O.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="kvcr-soak-") as folder:
        with Soak(seed, Path(folder)) as soak:
            soak.run(options.seconds, report=lambda line: print(line, flush=True))
        faults = soak.faults()
        print(soak.summary(), flush=True)
    for fault in faults:
        print(f"FAULT {fault}", flush=True)
    print("failed" if faults else "passed", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
