"""Build KenLM's `lmplz` and `build_binary` once, without root, into the user's cache.

    python -m scripts.build_kenlm

PyPI's `kenlm` package holds the sources of both programs but installs neither. They are
compiled from its source archive (checked by SHA-256) in a private build environment that brings
CMake, Ninja and Boost from PyPI; of the machine only a C++ compiler is used. The Boost libraries
that the programs need are copied beside them, and the run path is the program's own folder, so
the result depends on nothing that stays behind. KenLM's optional readers of compressed text are
left out: we send text through a pipe, and the programs would bind to whatever zlib is around.

The folder appears under its final name only when both programs have trained and converted a
small model. Two builds at once: the second waits for the first and uses its result.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from models import kenlm_tools
from models.errors import Fault, UserError
from models.files import sha256_file

SDIST_SHA256 = "c4628bb9fb63c8a6f9240035b8b037385cfc404cb72e933cf48878291edac1e8"
# Boost 1.89 took away the `system` component, which KenLM's CMakeLists.txt asks for.
BOOST = "cmeel-boost==1.88.*"
BUILD_PACKAGES = ("cmake>=3.26,<5", "ninja>=1.11", "setuptools>=65", "wheel")
BOOST_LIBRARIES = ("libboost_program_options", "libboost_thread")
STEP_TIMEOUT_S = 1800
# 24 distinct words in 40 lines: enough for lmplz with --discount_fallback at order 2.
_SMOKE_TEXT = "\n".join(f"w{i % 7} w{i % 24} w{i % 5}" for i in range(40)) + "\n"


def build(jobs: int | None = None) -> Path:
    """Build the programs unless they stand in the cache and run; return their folder.

    `jobs`: compilers at work at once, by default one for each CPU this process may use.
    Progress goes to stderr. Raises UserError when there is no C++ compiler or no source archive
    can be had, Fault when the compilation fails.
    """
    folder = kenlm_tools.tools_dir()
    if programs_run(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if programs_run(folder):
            return folder
        compiler = find_compiler()
        with tempfile.TemporaryDirectory(prefix=".kenlm-build-", dir=folder.parent) as work:
            finished = _compile(Path(work), compiler, jobs or _usable_cpus())
            _smoke_test(finished)
            if folder.exists():  # a broken build of before, for instance for an older libc
                shutil.rmtree(folder)
            finished.rename(folder)
    _say(f"KenLM's programs are in {folder}")
    return folder


def programs_run(folder: Path) -> bool:
    """Whether both programs in `folder` start (milliseconds)."""
    # Both print their help and exit with 1, so the text decides and not the exit status.
    marks = {"lmplz": "Kneser-Ney", "build_binary": "input.arpa"}
    for tool in kenlm_tools.TOOLS:
        try:
            answer = subprocess.run(
                [folder / tool, "--help"], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if marks[tool] not in answer.stdout + answer.stderr:
            return False
    return True


def find_compiler() -> str:
    """The C++ compiler: `$CXX`, c++, g++ or clang++, the first that runs. Raises UserError."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for name in filter(None, candidates):
        path = shutil.which(name)
        if path is None:
            continue
        # On macOS /usr/bin/c++ is there before a compiler is, so it must also run.
        answer = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
        if answer.returncode == 0:
            return path
    wanted = "', '".join(filter(None, candidates))
    raise UserError(
        f"no C++ compiler found (looked for '{wanted}'), and KenLM must be compiled once; "
        "install one: 'apt-get install g++' (Debian, Ubuntu), 'dnf install gcc-c++' (Fedora), "
        "'xcode-select --install' (macOS)"
    )


def _compile(work: Path, compiler: str, jobs: int) -> Path:
    """Compile in `work`; return the folder inside it that holds programs and libraries."""
    environment = _build_environment(work / "venv")
    binaries = environment / "bin"
    python = str(binaries / "python")
    settings = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "CXX": compiler,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    pip = [python, "-m", "pip", "--quiet"]
    _run("fetch CMake and Ninja", [*pip, "install", *BUILD_PACKAGES], settings)
    # --no-deps: its NumPy and cmeel serve Boost.Python, which KenLM does not use.
    _run("fetch Boost", [*pip, "install", "--no-deps", BOOST], settings)

    release = f"kenlm=={kenlm_tools.KENLM_VERSION}"
    download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "kenlm"]
    _run(f"fetch {release}", [*pip, *download, "--dest", str(work), release], settings)
    source = _unpack(work)

    boost = next(environment.glob("lib/python*/site-packages/cmeel.prefix"))
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_PREFIX_PATH": boost,
        "CMAKE_POLICY_DEFAULT_CMP0167": "NEW",  # Boost by its own config files: never the system's
        "CMAKE_DISABLE_FIND_PACKAGE_ZLIB": "ON",
        "CMAKE_DISABLE_FIND_PACKAGE_BZip2": "ON",
        "CMAKE_DISABLE_FIND_PACKAGE_LibLZMA": "ON",
        "CMAKE_DISABLE_FIND_PACKAGE_Eigen3": "ON",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": origin,
    }
    made = work / "build"
    configure = [str(binaries / "cmake"), "-S", str(source), "-B", str(made), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    _run("configure", configure, settings)
    ninja = [str(binaries / "ninja"), "-C", str(made), f"-j{jobs}", *kenlm_tools.TOOLS]
    _run(f"compile with {jobs} job(s)", ninja, settings)

    finished = work / "finished"
    finished.mkdir()
    for tool in kenlm_tools.TOOLS:
        shutil.copy2(made / "bin" / tool, finished)
    for library in BOOST_LIBRARIES:
        for path in (boost / "lib").glob(f"{library}.*"):
            if not path.is_symlink() and "1.88" in path.name:
                shutil.copy2(path, finished)
    for licence in ("LICENSE", "COPYING.LESSER.3"):
        shutil.copy2(source / licence, finished)
    return finished


def _build_environment(folder: Path) -> Path:
    _say("make a private build environment")
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"the private build environment '{folder}' cannot be made ({error}); on Debian and "
            "Ubuntu install 'python3-venv'"
        ) from error
    return folder


def _unpack(work: Path) -> Path:
    archive = work / f"kenlm-{kenlm_tools.KENLM_VERSION}.tar.gz"
    found = sha256_file(archive)
    if found != SDIST_SHA256:
        raise UserError(
            f"the source archive '{archive.name}' has SHA-256 '{found}', not '{SDIST_SHA256}': "
            "the package index served another file; check its address in pip's configuration"
        )
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work / f"kenlm-{kenlm_tools.KENLM_VERSION}"


def _smoke_test(folder: Path) -> None:
    """Train and convert a small model with the programs in `folder`. Raises Fault."""
    with tempfile.TemporaryDirectory(prefix="gristmill-kenlm-") as scratch:
        arpa, binary = Path(scratch) / "smoke.arpa", Path(scratch) / "smoke.arpa.bin"
        lmplz = [str(folder / "lmplz"), "-o", "2", "-S", "64M", "-T", f"{scratch}/"]
        lmplz += ["--discount_fallback", "--arpa", str(arpa)]
        _run("train a small model", lmplz, None, stdin=_SMOKE_TEXT)
        build_binary = [str(folder / "build_binary"), str(arpa), str(binary)]
        _run("convert the small model", build_binary, None)
        if not binary.is_file():
            raise Fault(f"build_binary reported success but wrote no file '{binary}'")


def _run(
    what: str,
    command: Sequence[str],
    settings: Mapping[str, str] | None,
    stdin: str | None = None,
) -> None:
    """Run one step quietly. Raises UserError when pip fails, Fault for any other command."""
    _say(what)
    try:
        done = subprocess.run(
            command,
            env=settings,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Fault(f"step '{what}' did not end within {STEP_TIMEOUT_S} s") from error
    if done.returncode == 0:
        return
    tail = "\n".join(done.stdout.strip().splitlines()[-15:])
    if "pip" in command:
        raise UserError(
            f"step '{what}' failed: pip could not get what the build needs; check the network "
            f"and pip's package index, then run '{kenlm_tools.BUILD_COMMAND}' again\n{tail}"
        )
    raise Fault(f"step '{what}' failed with status {done.returncode}\n{tail}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file lock `path`; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is building KenLM: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} kenlm: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build KenLM's programs and print their folder; the exit status is 0, 1 (fault) or 2."""
    parser = argparse.ArgumentParser(
        prog=kenlm_tools.BUILD_COMMAND,
        description="Build KenLM's lmplz and build_binary into the user's cache.",
        epilog=f"Example: {kenlm_tools.BUILD_COMMAND} --jobs 4",
    )
    parser.add_argument("--jobs", type=int, help="compilers at once (default: usable CPUs)")
    options = parser.parse_args(arguments)
    try:
        folder = build(options.jobs)
    except (UserError, Fault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
