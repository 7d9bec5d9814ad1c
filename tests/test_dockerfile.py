"""The worker image's Dockerfile, which is not built here: linted, and held against the project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CONSTRAINTS = dict(
    line.split("==")
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction, continued lines joined."""
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in
            (line.partition(" ") for line in text.splitlines() if line.strip())]  # fmt: skip


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_hadolint() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no hadolint beside this Python: pip install 'gristmill[dev]'")
    # DL3008: exact versions of Debian's packages vanish from its mirrors with each repair.
    command = [program, "--no-color", "--ignore", "DL3008", str(REPOSITORY / "Dockerfile")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_base_images_are_pinned_and_agree_with_the_project() -> None:
    python = {image.split(" ")[0] for image in of("FROM")}
    assert len(python) == 1
    requires = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert requires["requires-python"] == ">=3.11,<3.12"
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", python.pop())
    (beam,) = [rest for rest in of("COPY") if "apache/" in rest]
    version = CONSTRAINTS["apache-beam"]
    assert beam == (
        f"--from=apache/beam_python3.11_sdk:{version} /opt/apache/beam /opt/apache/beam"
    )
    assert any(f"apache_beam.__version__ == '{version}'" in rest for rest in of("RUN"))
    assert of("ENTRYPOINT") == ['["/opt/apache/beam/boot"]']


def test_it_copies_what_exists_and_the_whole_package() -> None:
    sources = [word for rest in of("COPY") if "--from" not in rest for word in rest.split()[:-1]]
    assert [name for name in sources if not (REPOSITORY / name).exists()] == []
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert packages <= set(sources)
    allowed = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert allowed[0] == "*"
    assert {line[1:] for line in allowed if line.startswith("!")} == set(sources)


def test_nothing_unpinned_or_secret() -> None:
    assert of("ADD") == []  # no download that nothing checks
    text = (REPOSITORY / "Dockerfile").read_text()
    assert not re.search(r"curl|wget|(?i:token|password|secret|credential)", text)
    installs = re.findall(r"pip (?:install|wheel) [^&]*", " ".join(of("RUN")))
    assert len(installs) == 2
    assert "--constraint constraints.txt" in installs[0]
    assert "--no-index --find-links=/wheels" in installs[1]
