# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How an option's value is read: leniently if its meaning is clear, else it is refused.

Each refusal says what is wrong with the value. ``config`` puts the option's name and
the value in front of it.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import peer_pattern

RANK = "{rank}"
"""Stands for the local data-parallel rank in a path."""

_VARIABLE = re.compile(r"\$(?:\([^)]*\)?|\{[^}]*\}?|[A-Za-z_]\w*)|\{\{.*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:")
_HOST = re.compile(r"[\w.-]+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtpe])(i?))?b?", re.IGNORECASE)
# NIXL accepts a plugin's name only in this spelling.
_MEMORY = ("UCX", "LIBFABRIC", "Mooncake", "UCCL", "GPUNETIO")
_FILES = ("POSIX", "GDS", "GDS_MT", "HF3FS", "GUSLI", "INFINIA", "OBJ", "AZURE_BLOB")
_PLUGINS = {name.lower(): name for name in (*_MEMORY, *_FILES)}


def _wrong_type(message: str) -> PydanticCustomError:
    # ``config`` turns errors whose type ends in "_type" into a TypeError.
    return PydanticCustomError("option_type", "{message}", {"message": message})


def _no_bool(value: Any) -> Any:
    # To Python a bool is an int, so true would silently become 1.
    if isinstance(value, bool):
        raise _wrong_type("Input should be a number, not a boolean")
    return value


def one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, (str, int, Path)) else value


# --- text ----------------------------------------------------------------------------


def no_variable(value: Any) -> Any:
    """Refuse text with a variable that a shell, Kubernetes or Helm did not expand."""
    if isinstance(value, str) and (found := _VARIABLE.search(value)):
        raise ValueError(
            f"contains the variable {found.group()!r}, which was not expanded: options "
            "are used literally. Define it where the options are written (in "
            "Kubernetes under env), or write its value"
        )
    return value


def _literal(value: str) -> str:
    """Check text that names a host or a file and is used literally."""
    if not value.strip():
        raise ValueError("is empty")
    if value != value.strip():
        raise ValueError("has spaces around it; remove them")
    if not value.isprintable():
        raise ValueError("contains a character that cannot be printed")
    return str(no_variable(value))


def _host(value: str) -> str:
    host = _literal(value)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        address = None
    if address is not None and address.version == 6:
        raise ValueError(
            "KVCR listens on IPv4 only; give an IPv4 address, or a name that has one"
        )
    if host == "*":
        raise ValueError("use 0.0.0.0 for all addresses")
    if address is None and not _HOST.fullmatch(host):
        raise ValueError(
            "give only the host, without scheme or port; control_ports sets the port"
        )
    if address is None and not host.strip("0123456789."):
        raise ValueError("is not an IPv4 address")
    return host


def _dialable(value: str) -> str:
    if value.strip() in ("*", "0.0.0.0", "::", "[::]"):
        raise ValueError("peers cannot dial a wildcard; give a host they can reach")
    return _host(value)


def _path(value: str) -> str:
    path = _literal(value)
    if _URL.match(path):
        raise ValueError("is a URL; give a path")
    if path.startswith("~"):
        raise ValueError("~ is not expanded; give the full path")
    return path


# --- numbers -------------------------------------------------------------------------


def _size(value: Any) -> Any:
    if not isinstance(value, str) or value.strip().isdecimal():
        return _no_bool(value)
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError('give a number of bytes, or text such as "8GiB" or "10G"')
    number, prefix, binary = found.groups()
    power = " kmgtpe".index((prefix or " ").lower())
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def _ports(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, (list, tuple)) and not value:
        raise ValueError("give at least one port, or leave it out to serve no peers")
    return one_or_more(value)


# --- g3 ------------------------------------------------------------------------------


def _g3_path(value: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise _wrong_type(f"{value!r} is not a path")
    try:
        path = _path(str(value))
    except ValueError as error:
        raise ValueError(f"{str(value)!r}: {error}") from None
    if "{" in path.replace(RANK, "") or "}" in path.replace(RANK, ""):
        raise ValueError(f"{path!r}: {RANK} is the only placeholder in braces")
    return Path(path)


def _g3_paths(value: Any) -> tuple[Any, ...]:
    """One path, several, or a list of paths for each local data-parallel rank."""
    given = one_or_more(value)
    if not isinstance(given, (list, tuple)):
        raise _wrong_type("give a path, a list of paths, or such a list for each rank")
    nested = [isinstance(each, (list, tuple)) for each in given]
    if any(nested) and not all(nested):
        raise ValueError("give either paths, or a list of paths for each rank")
    parts = given if any(nested) else [given]
    paths = tuple(tuple(_g3_path(each) for each in part) for part in parts)
    if not paths or not all(paths):
        raise ValueError("give at least one path")
    flat = [path for part in paths for path in part]
    for path in flat:
        if flat.count(path) > 1:
            raise ValueError(f"{str(path)!r} is given twice; give each file once")
    return paths if any(nested) else paths[0]


def _mapping(value: Any) -> Any:
    if value is None or isinstance(value, (Mapping, BaseModel)):
        return value
    raise _wrong_type(
        'give a mapping: {"paths": "/folder/file", "capacity_bytes_per_file": '
        '"100GiB", "backend": "POSIX"}'
    )


def _plugin(value: str) -> str:
    name = str(no_variable(value.strip()))
    if not name:
        raise ValueError("is empty")
    return _PLUGINS.get(name.lower(), name)


def _plugin_options(value: Any) -> Any:
    """Convert to text, as NIXL needs it; it would read ``True`` as false."""
    if not isinstance(value, Mapping):
        return value
    read = {}
    for key, each in value.items():
        if not isinstance(each, (str, bool, int, float)):
            raise ValueError(f"{key!r}: {each!r} is not text, a number or a boolean")
        text = str(no_variable(str(each).strip()))
        read[key] = text.lower() if text.lower() in ("true", "false") else text
    return read


def _read(by: Callable[[Any], Any], written: Any) -> BeforeValidator:
    """Have ``by`` convert a value, whose type the JSON schema shows as ``written``."""
    return BeforeValidator(by, json_schema_input_type=written)


# Constraints inside the innermost Annotated become part of the JSON schema.
_NUMBER = Annotated[str, Field(pattern=r"^[0-9]+$")]
_SIZE_TEXT = Annotated[
    str, Field(pattern=r"^ *[0-9]+(\.[0-9]+)? *([kKmMgGtTpPeE]i?)?[bB]? *$")
]
_ONE_UP = Annotated[int, Field(gt=0)]
_ZERO_UP = Annotated[int, Field(ge=0)]
_UP_TO_1000 = Annotated[int, Field(ge=0, le=1000)]
Count = Annotated[_ONE_UP, _read(_no_bool, _ONE_UP | _NUMBER)]
CountOrNone = Annotated[_ZERO_UP, _read(_no_bool, _ZERO_UP | _NUMBER)]
Delay = Annotated[_UP_TO_1000, _read(_no_bool, _UP_TO_1000 | _NUMBER)]
Size = Annotated[_ONE_UP, _read(_size, _ONE_UP | _SIZE_TEXT)]
SizeOrNone = Annotated[_ZERO_UP, _read(_size, _ZERO_UP | _SIZE_TEXT)]
Text = Annotated[str, AfterValidator(no_variable), Field(min_length=1)]
Host = Annotated[str, AfterValidator(_host)]
DialableHost = Annotated[str, AfterValidator(_dialable)]
FilePath = Annotated[str, AfterValidator(_path)]
Plugin = Annotated[str, AfterValidator(_plugin)]
_PORT = Annotated[int, Field(ge=1, le=65535)]
_PORT_TEXT = Annotated[str, Field(pattern=r"^ *[0-9]+ *(, *[0-9]+ *)*$")]
_PORT_LIST = Annotated[list[_PORT | _NUMBER], Field(min_length=1)]
_Port = Annotated[_PORT, BeforeValidator(_no_bool)]
Ports = Annotated[tuple[_Port, ...], _read(_ports, _PORT | _PORT_TEXT | _PORT_LIST)]
_ONE_OR_MORE = _read(one_or_more, str | list[str])
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _ONE_OR_MORE]
_Peer = Annotated[str, AfterValidator(no_variable), AfterValidator(peer_pattern)]
Peers = Annotated[tuple[_Peer, ...], _ONE_OR_MORE, Field(min_length=1)]
G3Paths = Annotated[
    tuple[Path, ...],
    PlainValidator(_g3_paths, json_schema_input_type=str | list[str] | list[list[str]]),
]
_PLAIN = str | bool | int | float
PluginOptions = Annotated[dict[str, str], _read(_plugin_options, dict[str, _PLAIN])]
MAPPING = BeforeValidator(_mapping)
