"""The run on Flink, where its job server is at hand (docs/flink.md)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts.cli import main
from tests.pipelines.mining import run, same_files

JAR = os.environ.get("GRISTMILL_FLINK_JOB_SERVER_JAR", "")

pytestmark = [
    pytest.mark.usefixtures("registered_models"),
    pytest.mark.skipif(not JAR, reason="GRISTMILL_FLINK_JOB_SERVER_JAR names no jar"),
    pytest.mark.skipif(shutil.which("java") is None, reason="no java on the PATH"),
]


def test_the_same_bytes_on_flink(small: list[Path], tmp_path: Path) -> None:
    settings = ["output.drops=true", "dedup.ranges=4"]
    run(small, tmp_path / "local", *settings)
    arguments = ["mine", "default", "--output", str(tmp_path / "flink")]
    for path in small:
        arguments += ["--input", str(path)]
    for setting in settings:
        arguments += ["--set", setting]
    options = ["--runner=FlinkRunner", f"--flink_job_server_jar={JAR}", "--parallelism=2"]
    assert main([*arguments, "--", *options]) == 0
    same_files(tmp_path / "flink", tmp_path / "local")
