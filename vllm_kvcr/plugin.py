# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The entry point through which vLLM finds this distribution's KVCR tier.

vLLM calls ``register()`` in each of its processes before it imports any tier. It
touches no file of vLLM: it puts the folder that contains our ``kvcr`` package first on
the search path of ``vllm.v1.kv_offload.tiering``, in memory.

Failure model: vLLM does not guard the call, so it never raises. Errors are logged, and
vLLM keeps the tiers that it had.
"""

import importlib
import logging
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from vllm_kvcr import __version__

TIER_TYPE = "kvcr"
TIERING_PACKAGE = "vllm.v1.kv_offload.tiering"
TIER_PACKAGE = f"{TIERING_PACKAGE}.{TIER_TYPE}"
MANAGER_MODULE = f"{TIER_PACKAGE}.manager"
MANAGER_CLASS = "KVCRSecondaryTierManager"

# A child of "vllm", so that vLLM's handler and level apply.
logger = logging.getLogger("vllm.plugins.kvcr")

_last_line = ""


def register() -> None:
    """Make type ``kvcr`` resolve to this distribution's adapter.

    Logs one line that says which adapter serves ``kvcr`` now. A later call in the same
    process restores what was undone meanwhile, and logs a line only if it differs.
    """
    try:
        level, line = _register()
    except Exception as error:
        _log_news(
            logging.ERROR,
            f"vllm-kvcr {__version__} could not be registered, and vLLM was left as it "
            f"was: {type(error).__name__}: {error}",
            exc_info=True,
        )
    else:
        _log_news(level, line)


def _log_news(level: int, line: str, exc_info: bool = False) -> None:
    global _last_line
    if line != _last_line:
        _last_line = line
        logger.log(level, "KVCR tier: %s", line, exc_info=exc_info)


def packaged_tiering_folder() -> Path:
    """The folder that contains our ``kvcr`` package.

    In a wheel it is inside ``vllm_kvcr``. In an editable install and in a checkout it
    is where vLLM's tree has it.
    """
    here = Path(__file__).resolve().parent
    in_wheel = here / "_tiering"
    in_checkout = here.parent.joinpath(*TIERING_PACKAGE.split("."))
    for folder in (in_wheel, in_checkout):
        if (folder / TIER_TYPE / "__init__.py").is_file():
            return folder
    raise FileNotFoundError(
        f"vllm-kvcr is incomplete: no {TIER_TYPE}/ in {in_wheel} or {in_checkout}"
    )


def _register() -> tuple[int, str]:
    """Register, and return the level and text of the line to log."""
    folder = packaged_tiering_folder()
    try:
        tiering = importlib.import_module(TIERING_PACKAGE)
    except ModuleNotFoundError as error:
        if error.name is None or not TIERING_PACKAGE.startswith(error.name):
            raise
        return logging.WARNING, (
            f"not available, because this vLLM has no {error.name}; "
            "upgrade vLLM to use tiered KV-cache offloading"
        )

    imported = sys.modules.get(TIER_PACKAGE)
    if imported is not None and _folder_of(imported) != folder / TIER_TYPE:
        return logging.WARNING, (
            f"type '{TIER_TYPE}' is still served by the adapter in "
            f"{_folder_of(imported)}, which was imported before vllm-kvcr "
            f"{__version__} was registered"
        )

    path_before = tiering.__path__
    others = [entry for entry in path_before if entry != str(folder)]
    replaced = _folder_found_on(others)
    tiering.__path__ = [str(folder), *others]
    try:
        _register_type_where_missing()
    except Exception:
        tiering.__path__ = path_before
        raise

    line = (
        f"type '{TIER_TYPE}' is served by vllm-kvcr {__version__} "
        f"from {folder / TIER_TYPE}"
    )
    if replaced is not None:
        line += f", in place of the adapter in {replaced}"
    return logging.INFO, line


def _register_type_where_missing() -> None:
    # This imports neither a tier nor KVCR: the factory knows its tiers only by name.
    factory = importlib.import_module(f"{TIERING_PACKAGE}.factory").SecondaryTierFactory
    try:
        factory.register_tier(TIER_TYPE, MANAGER_MODULE, MANAGER_CLASS)
    except ValueError:
        logger.debug("vLLM already has a tier type '%s'", TIER_TYPE)


def _folder_of(package: ModuleType) -> Path | None:
    paths = list(getattr(package, "__path__", ()))
    return Path(paths[0]).resolve() if paths else None


def _folder_found_on(search_path: list[str]) -> Path | None:
    """Where the import system would find the tier, without importing it."""
    spec = PathFinder.find_spec(TIER_PACKAGE, search_path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()
