# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A stand-in for `uv` that knows one command: `uv pip install`.

It writes each call down as a line of JSON and installs from an index in a JSON file
(`{name: {version: {"requires": [...], "modules": {name: source}}}}`) into the
environment of `--python`. As the real one it takes dependencies along unless told not
to, and leaves alone what is satisfied already. Any other option ends it with status 2.
"""

import argparse
import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


class Environment:
    def __init__(self, python: str, index: dict) -> None:
        (self.site,) = Path(python).parents[1].glob("lib/python*/site-packages")
        self.index = index

    def install(self, requirement: Requirement, with_dependencies: bool) -> None:
        name, releases = requirement.name, self.index.get(requirement.name, {})
        found = metadata.distributions(name=name, path=[str(self.site)])
        installed = next((each.version for each in found), None)
        if installed is None or installed not in requirement.specifier:
            version = max(requirement.specifier.filter(releases), default=None)
            if version is None:
                sys.exit(f"No solution found: there is no {requirement}")
            if installed is not None:
                for module in releases[installed]["modules"]:
                    shutil.rmtree(self.site / module)
                shutil.rmtree(self.metadata_folder(name, installed))
            self.write(name, version)
            installed = version
        if with_dependencies:
            for dependency in map(Requirement, releases[installed]["requires"]):
                marker = dependency.marker
                if marker is None or marker.evaluate({"extra": ""}):
                    self.install(dependency, with_dependencies)

    def write(self, name: str, version: str) -> None:
        release = self.index[name][version]
        for module, source in release["modules"].items():
            (self.site / module).mkdir()
            (self.site / module / "__init__.py").write_text(source)
        folder = self.metadata_folder(name, version)
        folder.mkdir()
        requires = "".join(f"Requires-Dist: {line}\n" for line in release["requires"])
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{requires}"
            f"\n{release.get('description', '')}"
        )

    def metadata_folder(self, name: str, version: str) -> Path:
        return self.site / f"{name.replace('-', '_')}-{version}.dist-info"


def main() -> None:
    arguments = sys.argv[1:]
    with open(os.environ["STAND_IN_UV_CALLS"], "a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[:2] != ["pip", "install"]:
        sys.exit(2)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--python", required=True)
    parser.add_argument("--no-deps", action="store_true")
    parser.add_argument("requirements", nargs="+", type=Requirement)
    options = parser.parse_args(arguments[2:])
    index = json.loads(Path(os.environ["STAND_IN_UV_INDEX"]).read_text())
    environment = Environment(options.python, index)
    for requirement in options.requirements:
        environment.install(requirement, with_dependencies=not options.no_deps)


if __name__ == "__main__":
    main()
