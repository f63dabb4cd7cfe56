# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Kubernetes example: valid for the API, and what it runs is what we ship.

The schemas are Kubernetes' own, with unknown fields forbidden.
"""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_kvcr import guard
from vllm_kvcr.doctor.command import run
from vllm_kvcr.doctor.finding import Status
from vllm_kvcr.doctor.guard import digest_of
from vllm_kvcr.doctor.setting import Setting, read_json

FILE = Path(__file__).resolve().parents[2] / "examples/kubernetes/workers.yaml"
# The first with sidecars switched on, and the newest whose schema is at hand.
RELEASES = ["1.29", "1.37"]
POD_IP = "10.1.2.3"
GIB = 1 << 30


def objects() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text())}


def pod() -> Any:
    return objects()["StatefulSet"]["spec"]["template"]["spec"]


def engine() -> Any:
    return pod()["containers"][0]


def sidecar() -> Any:
    return pod()["initContainers"][0]


def expanded(container: Any) -> list[str]:
    """The arguments as Kubernetes makes them: of variables that are known already."""
    known: dict[str, str] = {}

    def expand(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), text)

    for variable in container["env"]:
        if "value" in variable:
            known[variable["name"]] = expand(variable["value"])
        else:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            known[variable["name"]] = POD_IP
    return [expand(argument) for argument in container["args"]]


def argument(container: Any, name: str) -> str:
    (found,) = [a for a in expanded(container) if a.startswith(f"{name}=")]
    return found.removeprefix(f"{name}=")


def setting() -> Setting:
    return Setting(
        read_json(argument(engine(), "--kv-transfer-config"), "config"),
        read_json(argument(engine(), "--kv-events-config"), "events"),
    )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["Service", "StatefulSet", "NetworkPolicy"])
def test_every_object_fits_the_schema(kind, release):
    kubernetes_validate.validate(objects()[kind], release, strict=True)
    assert len(objects()) == 3


def test_the_configuration_is_accepted_once_kubernetes_has_filled_it_in():
    ((_, config),) = setting().valid
    assert config.control_advertise_host == POD_IP
    found = list(run("options", setting()))
    assert [f.status for f in found] == [Status.OK], found
    for container in (engine(), sidecar()):
        assert not [a for a in expanded(container) if "$(" in a]


def test_the_sidecar_starts_the_service_that_the_engine_looks_for(tmp_path):
    command = [*sidecar()["command"], *expanded(sidecar())]
    assert command[:2] == ["vllm-kvcr", "guard"]
    given = guard._parser().parse_args(command[2:])
    service = guard.service_command(Setting(read_json(given.config, "config")), given)
    ((_, config),) = setting().valid
    told = dict(zip(service[3::2], service[4::2], strict=True))
    assert told["--socket-path"] == config.kvcr_service_socket_path
    assert told["--compatibility-digest"] == digest_of(config)
    assert told["--guard-count"] == str(len(config.control_ports or ()))


def test_ports_of_the_container_are_those_of_the_configuration():
    ((_, config),) = setting().valid
    ports = {each["name"]: each["containerPort"] for each in engine()["ports"]}
    assert (ports["kvcr-control"],) == config.control_ports
    assert setting().events["endpoint"] == f"tcp://*:{ports['kv-events']}"


def test_shared_memory_holds_the_primary_tier_and_the_pool():
    given = guard._parser().parse_args(expanded(sidecar()))
    primary = setting().tiers[0].connector["cpu_bytes_to_use"]
    volumes = {each["name"]: each["emptyDir"] for each in pod()["volumes"]}
    room = int(volumes["shm"]["sizeLimit"].removesuffix("Gi")) * GIB
    assert primary + given.pool_size + guard._JOURNAL_BYTES <= room
    assert engine()["volumeMounts"] == sidecar()["volumeMounts"]
    mounts = {each["mountPath"] for each in engine()["volumeMounts"]}
    assert {"/dev/shm", "/run/kvcr"} <= mounts
