"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything loads torch, and for every process that a test starts: the tests themselves run
# on as many workers as there are cores, and sums of floats depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


def pytest_configure() -> None:
    """Hear Ctrl+C also where a shell has started the tests in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of one thread, whatever the process that runs the tests belongs to."""
    import torch  # takes seconds, which most tests need not pay

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real text to run on; it never stands in the repository."""
    folder = Path(os.environ.get("GRISTMILL_DATA", SHARED / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at '{folder}' (set GRISTMILL_DATA)")
    return folder


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Input/output pairs recorded from CCNet's own code."""
    folder = Path(os.environ.get("GRISTMILL_GOLDEN", SHARED / "golden"))
    if not folder.is_dir():
        pytest.skip(f"no golden vectors at '{folder}' (set GRISTMILL_GOLDEN)")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()
