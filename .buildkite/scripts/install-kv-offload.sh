#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Makes a CUDA test image ready for the KVCR tests of tests/v1/kv_offload/tiering.
#
# kvcr requires the meta package `nixl`, which would bring the NIXL wheels of every
# CUDA major along. Only the one that fits this image is wanted, so kvcr, nixl and
# that wheel are installed without dependencies, and what else kvcr requires is
# resolved on its own. A NIXL wheel for another CUDA major stays as it is: `nixl`
# picks the wheel that fits torch, so it does no harm.
#
# Installs into the environment of the first `python3` on PATH.

set -euo pipefail

readonly KVCR_VERSION=0.1.1

fail() {
    echo "install-kv-offload: $*" >&2
    exit 1
}

if [[ -z "${CUDA_VERSION:-}" ]]; then
    echo "install-kv-offload: CUDA_VERSION is empty, not a CUDA image: nothing to do"
    exit 0
fi

readonly cuda_major="${CUDA_VERSION%%.*}"
case "${cuda_major}" in
    12 | 13) ;;
    *) fail "no NIXL wheel is known for CUDA_VERSION=${CUDA_VERSION}, only for 12 and 13" ;;
esac

command -v uv >/dev/null || fail "uv is not on PATH"
python=$(command -v python3) || fail "python3 is not on PATH"
readonly python

# Else a folder of the working directory called kvcr would pass for the package.
export PYTHONSAFEPATH=1

install() {
    uv pip install --python "${python}" "$@" || fail "could not install: $*"
}

# Prints the version of nixl that the installed kvcr requires, then the rest of its
# requirements, one a line.
read_kvcr_requirements() {
    "${python}" - <<'PY'
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

requirements = [
    requirement
    for requirement in map(Requirement, metadata.requires("kvcr") or [])
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
]
nixl_pins = [
    pin
    for requirement in requirements
    if canonicalize_name(requirement.name) == "nixl"
    for pin in requirement.specifier
]
match nixl_pins:
    case [pin] if pin.operator == "==" and not pin.version.endswith(".*"):
        print(pin.version)
    case _:
        found = ",".join(map(str, nixl_pins)) or "nothing"
        raise SystemExit(f"expected kvcr to require one exact nixl, found: {found}")
for requirement in requirements:
    if canonicalize_name(requirement.name) != "nixl":
        print(requirement)
PY
}

# A test that cannot import its package skips itself, which would look like success.
require_importable() {
    "${python}" -c "import $1" ||
        fail "$1 cannot be imported after the installation: its tests would be skipped"
}

install --no-deps "kvcr==${KVCR_VERSION}"

requirements=$(read_kvcr_requirements) ||
    fail "cannot tell from its metadata what kvcr ${KVCR_VERSION} requires"
mapfile -t requirements <<<"${requirements}"
readonly nixl_version="${requirements[0]}"
readonly other_requirements=("${requirements[@]:1}")

install --no-deps "nixl==${nixl_version}" "nixl-cu${cuda_major}==${nixl_version}"
if ((${#other_requirements[@]})); then
    install "${other_requirements[@]}"
fi

require_importable nixl
require_importable kvcr

echo "install-kv-offload: kvcr ${KVCR_VERSION} with nixl-cu${cuda_major} ${nixl_version} is ready"
