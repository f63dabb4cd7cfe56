# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real Prometheus: found or unpacked, run on a folder, and asked over HTTP.

Where ``prometheus`` and ``promtool`` are not on the path, Debian's package is
downloaded and unpacked into a folder; nothing is installed.

Failure model: what is missing or does not start raises ``PrometheusFailed``, which says
what to do.
"""

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

PROGRAMS = ("prometheus", "promtool")
SCRAPE_SECONDS = 1
START_SECONDS = 60.0
_ADVICE = "install Prometheus, so that prometheus and promtool are on the path"


class PrometheusFailed(Exception):
    """There is no Prometheus, or it does not do what it was asked to."""


def programs(folder: Path) -> dict[str, Path]:
    """The two programs, unpacked into ``folder`` if they are not on the path."""
    on_path = {name: shutil.which(name) for name in PROGRAMS}
    if all(on_path.values()):
        return {name: Path(str(found)) for name, found in on_path.items()}
    unpacked = {name: folder / "usr" / "bin" / name for name in PROGRAMS}
    if not all(path.exists() for path in unpacked.values()):
        _unpack(folder)
    return unpacked


def _unpack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "prometheus"]
    try:
        subprocess.run(download, cwd=folder, check=True, capture_output=True)
        package = next(folder.glob("prometheus_*.deb"))
        unpack = ["dpkg-deb", "-x", str(package), str(folder)]
        subprocess.run(unpack, check=True, capture_output=True)
        package.unlink()
    except (OSError, StopIteration, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or b""
        raise PrometheusFailed(
            f"Debian's package prometheus could not be unpacked: {error} "
            f"{output.decode(errors='replace').strip()}; {_ADVICE}"
        ) from error


def promtool(program: Path, *arguments: str, given: str = "") -> tuple[int, str]:
    """Run promtool; its exit status and all that it printed."""
    ended = subprocess.run(
        [program, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stdout + ended.stderr


class Prometheus:
    """One server that scrapes, from ``__enter__`` to ``__exit__``.

    Args:
        targets: Name -> port on this machine.
        rules: Files with alerts.
    """

    def __init__(
        self,
        program: Path,
        folder: Path,
        port: int,
        targets: Mapping[str, int],
        rules: Sequence[Path],
    ) -> None:
        self._log = folder / "prometheus.log"
        self._config = folder / "prometheus.yml"
        self._config.write_text(yaml.safe_dump(_config(targets, rules)))
        self._command = [
            str(program),
            f"--config.file={self._config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if self._http.get("/-/ready").is_success:
                    return self
            time.sleep(0.1)
        self._end()
        raise PrometheusFailed(f"it did not start:\n{self._log.read_text()[-2000:]}")

    def __exit__(self, *raised: object) -> None:
        self._http.close()
        self._end()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        return self._result("/api/v1/query", query=expression)

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """The series that an expression has over a time."""
        return self._result(
            "/api/v1/query_range", query=expression, start=start, end=end, step=step
        )

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health and state."""
        groups = self._get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _result(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        result = self._get(path, **parameters)["result"]
        assert isinstance(result, list)
        return result

    def _get(self, path: str, **parameters: Any) -> Any:
        response = self._http.get(path, params=parameters)
        body = response.json()
        if body.get("status") != "success":
            raise PrometheusFailed(f"{parameters}: {body.get('error')}")
        return body["data"]

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)


def _config(targets: Mapping[str, int], rules: Sequence[Path]) -> dict[str, Any]:
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS}s",
            "evaluation_interval": f"{SCRAPE_SECONDS}s",
        },
        "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [
            {
                "job_name": "vllm",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
                    for name, port in targets.items()
                ],
            }
        ],
    }
