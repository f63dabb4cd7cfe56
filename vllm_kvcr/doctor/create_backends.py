# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Has NIXL create backends, in a process that may crash.

Answers with the plugins that this NIXL offers, and then with one line for each backend.
"""

import uuid

from vllm_kvcr.doctor.child import answer, arguments


def main() -> None:
    # NIXL ships no type annotations.
    from nixl import (  # type: ignore[import-untyped]
        nixl_agent,
        nixl_agent_config,
    )

    agent = nixl_agent(f"doctor-{uuid.uuid4().hex}", nixl_agent_config(backends=[]))
    answer(sorted(agent.get_plugin_list()))
    for name, options in arguments()["backends"]:
        try:
            agent.create_backend(name, options)
        except Exception as error:
            answer(f"{type(error).__name__}: {error}")
        else:
            answer(None)


if __name__ == "__main__":
    main()
