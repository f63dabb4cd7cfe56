# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a module of Dynamo's: ``python under_dynamo.py MODULE [ARGUMENT ...]``.

Two names that it imports are stood in for. Nothing here calls either.
"""

import runpy
import sys
from types import ModuleType
from typing import Any

# Only for images, and no longer where this module was.
images: Any = ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
images.smart_resize = None
sys.modules[images.__name__] = images

if __name__ == "__main__":
    module = sys.argv.pop(1)
    if module == "dynamo.vllm":
        from vllm.v1.engine import utils

        # Only for embeddings, and gone in vLLM 0.33.
        if not hasattr(utils, "get_engine_zmq_addresses"):
            utils.get_engine_zmq_addresses = None
    runpy.run_module(module, run_name="__main__", alter_sys=True)
