"""The build of KenLM's programs: found, refused, once, never half, and for real (slow)."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from models import kenlm_tools
from models.errors import Fault, UserError
from scripts import build_kenlm

# Stand-ins: they answer --help as the real ones do and write the file named last.
_FAKE_LMPLZ = (
    '#!/bin/sh\necho Kneser-Ney\nfor last; do :; done\n[ "$last" = --help ] || : > "$last"\n'
)
_FAKE_BUILD_BINARY = _FAKE_LMPLZ.replace("Kneser-Ney", "input.arpa")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRISTMILL_CACHE", str(folder))
    return folder


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _fake_compile(work: Path, compiler: str, jobs: int) -> Path:
    time.sleep(0.2)
    finished = work / "finished"
    finished.mkdir()
    _write_program(finished / "lmplz", _FAKE_LMPLZ)
    _write_program(finished / "build_binary", _FAKE_BUILD_BINARY)
    return finished


def test_an_absent_tool_is_a_user_error_with_the_command_that_builds_it(cache: Path) -> None:
    with pytest.raises(UserError, match=r"'lmplz' is not at '.*'; .*python -m scripts.build_kenlm"):
        kenlm_tools.tool_path("lmplz")


def test_the_cache_is_named_by_the_environment_or_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE", "/somewhere/else")
    assert kenlm_tools.tools_dir().parent == Path("/somewhere/else")
    monkeypatch.delenv("GRISTMILL_CACHE")
    monkeypatch.setenv("HOME", "/home/ada")
    assert kenlm_tools.cache_dir() == Path("/home/ada/.cache/gristmill")


def test_without_a_compiler_the_message_says_what_to_install(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)
    assert build_kenlm.main([]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: no C++ compiler found (looked for 'c++', 'g++', 'clang++')")
    assert "apt-get install g++" in message
    assert not kenlm_tools.tools_dir().exists()


def test_a_compiler_that_is_there_but_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _write_program(tmp_path / "c++", "#!/bin/sh\nexit 1\n")  # macOS without Xcode's tools
    _write_program(tmp_path / "g++", "#!/bin/sh\nexit 0\n")
    assert build_kenlm.find_compiler() == str(tmp_path / "g++")


def test_two_builds_at_once_compile_once_and_a_third_returns_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def count(work: Path, compiler: str, jobs: int) -> Path:
        compiled.append(work)
        return _fake_compile(work, compiler, jobs)

    monkeypatch.setattr(build_kenlm, "_compile", count)
    monkeypatch.setattr(build_kenlm, "find_compiler", lambda: "c++")
    threads = [threading.Thread(target=build_kenlm.build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build_kenlm.build() == kenlm_tools.tools_dir()
    assert len(compiled) == 1
    assert kenlm_tools.tool_path("lmplz").read_text() == _FAKE_LMPLZ
    left = sorted(path.name for path in cache.iterdir())
    name = kenlm_tools.tools_dir().name
    assert left == [name, f"{name}.lock"]


def test_a_broken_build_is_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_kenlm, "_compile", _fake_compile)
    monkeypatch.setattr(build_kenlm, "find_compiler", lambda: "c++")
    folder = build_kenlm.build()
    _write_program(folder / "lmplz", "#!/bin/sh\necho 'GLIBC_2.99 not found' >&2\nexit 1\n")
    assert not build_kenlm.programs_run(folder)
    assert build_kenlm.build() == folder
    assert build_kenlm.programs_run(folder)


def test_programs_that_cannot_train_never_get_the_final_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_broken(work: Path, compiler: str, jobs: int) -> Path:
        finished = _fake_compile(work, compiler, jobs)
        _write_program(finished / "build_binary", "#!/bin/sh\necho disk full\nexit 3\n")
        return finished

    monkeypatch.setattr(build_kenlm, "_compile", compile_broken)
    monkeypatch.setattr(build_kenlm, "find_compiler", lambda: "c++")
    with pytest.raises(Fault, match="'convert the small model' failed with status 3\ndisk full"):
        build_kenlm.build()
    assert [path.name for path in cache.iterdir()] == [f"{kenlm_tools.tools_dir().name}.lock"]


def test_another_source_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kenlm-0.3.0.tar.gz").write_bytes(b"not what was asked for")
    with pytest.raises(UserError, match=r"'kenlm-0\.3\.0\.tar\.gz' has SHA-256 '[0-9a-f]{64}'"):
        build_kenlm._unpack(tmp_path)


@pytest.mark.slow
def test_the_real_build_runs_from_any_folder(cache: Path, tmp_path: Path) -> None:
    folder = build_kenlm.build()
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    arpa = tmp_path / "model.arpa"
    done = subprocess.run(
        [moved / "lmplz", "-o", "2", "-S", "64M", "--discount_fallback", "--arpa", arpa],
        input="a b c\na b d\n",
        capture_output=True,
        text=True,
        env={},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ngram 1=7\n" in arpa.read_text()  # a b c d and <s> </s> <unk>
