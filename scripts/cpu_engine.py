# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A vLLM release that has no CPU build, made to run on a machine without a GPU.

The release's wheel is a CUDA build. Its Python files run over the extension modules of
an earlier release's CPU build. They go into a folder of their own; put first on
``PYTHONPATH``, it hides the CPU build's Python files and uses its dependencies.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

# Not run without a GPU: extension modules, headers for compilers, a server in Rust.
_LEFT_OUT = (".so", ".cu", ".cuh", ".h", ".hpp", ".inl", "/vllm-rs")


def build(
    folder: Path, version: str, cpu_build: Path, pip: Callable[..., None]
) -> None:
    """Put vLLM ``version`` into ``folder``.

    Args:
        cpu_build: The folder with the ``vllm`` package whose extension modules are
            used. They are linked to, so it has to stay.
        pip: Called with a title and pip's arguments.
    """
    pin = f"vllm=={version}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip(f"downloading {pin}", "download", "--no-deps", "--dest", scratch, pin)
        (wheel,) = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as files:
            wanted = [n for n in files.namelist() if not n.endswith(_LEFT_OUT)]
            files.extractall(folder, wanted)
    for library in (cpu_build / "vllm").glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    # By its version vLLM tells that this build is for the CPU.
    metadata = folder / f"vllm-{version}.dist-info"
    metadata = metadata.rename(folder / f"vllm-{version}+cpu.dist-info") / "METADATA"
    text = metadata.read_text()
    line = f"\nVersion: {version}"
    metadata.write_text(text.replace(f"{line}\n", f"{line}+cpu\n", 1))
