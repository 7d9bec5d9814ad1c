"""Exported models: transformers opens them offline and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models import files
from models.errors import Fault, UserError
from models.tokenizer import save_tokenizer, train_tokenizer
from scripts import cli
from tests.training.checkpointed import STATE, Job, Trained, on_ranks
from training import checkpoint, model_files
from training.export import export, export_checkpoint
from training.together import on_first

FAMILIES = ("decoder", "albert")
AUTO = {
    "decoder": ["AutoModelForCausalLM"],
    "albert": ["AutoModelForPreTraining", "AutoModelForMaskedLM"],
}
_LOAD = """
import sys, json, torch, transformers
results = {}
for family, (folder, names) in json.loads(sys.argv[1]).items():
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = tokenizer("grain wheat", return_tensors="pt")
    results[family] = {"length": tokenizer.model_max_length, "names": sorted(found),
                       "ids": found["input_ids"][0].tolist(), "logits": []}
    for name in names:
        model = getattr(transformers, name).from_pretrained(folder).eval()
        with torch.no_grad():
            output = model(**found)
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        results[family]["logits"].append(logits[0].tolist())
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["grain wheat flour river stone mill", "wind and water turn the mill stones"] * 9
    save_tokenizer(train_tokenizer(texts, vocab_size=30), folder, {})
    return str(folder)


def trained(family: str, rank: int = 0, ranks: int = 1, strategy: str = "single") -> Trained:
    found = Trained(Job(family, "adamw", strategy, steps=1), rank, ranks)
    found.step(0)
    return found


def test_transformers_opens_it_offline(tokenizer: str, tmp_path: Path) -> None:
    networks = {family: trained(family).objective.network.eval() for family in FAMILIES}
    request = {
        family: (
            str(export(network, tokenizer, tmp_path / family, max_length=32, state=STATE)),
            AUTO[family],
        )
        for family, network in networks.items()
    }
    found = subprocess.run(
        [sys.executable, "-c", _LOAD, json.dumps(request)],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "none")},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for family, result in json.loads(found.stdout).items():
        ids = torch.tensor([result["ids"]])
        assert result["length"] == 32
        assert ids[0, 0] == 2  # [CLS]
        # A prompt of a decoder is the beginning of a document; ALBERT reads whole segments.
        assert (ids[0, -1] == 3) == (family == "albert")
        assert ("token_type_ids" in result["names"]) == (family == "albert")
        with torch.no_grad():
            output = networks[family](input_ids=ids)
        expected = output.prediction_logits if family == "albert" else output.logits
        assert len(result["logits"]) == len(AUTO[family])
        for logits in result["logits"]:
            assert torch.equal(torch.tensor([logits]), expected)


def test_what_stands_in_the_folder(tokenizer: str, tmp_path: Path) -> None:
    folder = export(
        trained("albert").objective.network, tokenizer, tmp_path / "model", max_length=32,
        state=STATE,
    )  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "tokenizer.json").read_bytes() == (
        Path(tokenizer) / "tokenizer.json"
    ).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["AlbertForPreTraining"]
    assert config["dtype"] == "float32"
    card = (folder / "README.md").read_text()
    for fact in ("m" * 64, "c" * 32, "t" * 64, "r" * 32, "2 of 9", "| tokens | 96 |",
                 "domain `bn` | 75.00%"):  # fmt: skip
        assert fact in card
    # The same network gives the same bytes, and takes the place of an older export.
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "old").touch()
    export(trained("albert").objective.network, tokenizer, folder, max_length=32, state=STATE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failure_leaves_the_older_export(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = trained("albert").objective.network
    folder = export(network, tokenizer, tmp_path / "model", max_length=32, state=STATE)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(model_files, "write_tokenizer", full)
    with pytest.raises(Fault, match=r"cannot export to '.*model': No space left on device: 'x'"):
        export(network, tokenizer, folder, max_length=64, state=STATE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_lone_tokenizer_json_gets_its_configuration(tokenizer: str, tmp_path: Path) -> None:
    lone = tmp_path / "lone" / "my.json"
    lone.parent.mkdir()
    lone.write_bytes((Path(tokenizer) / "tokenizer.json").read_bytes())
    (tmp_path / "out").mkdir()
    model_files.write_tokenizer(str(lone), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == lone.read_bytes()
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["mask_token"] == "[MASK]"


def export_sharded(job: tuple[Job, str, str], rank: int, ranks: int) -> str:
    """Save and export from shards, after an evaluation that has gathered them."""
    made, tokenizer, directory = job
    found = Trained(made, rank, ranks)
    found.objective.eval()
    with torch.no_grad():
        found.parallel({"input_ids": torch.full((1, 4), 9), "labels": torch.full((1, 4), -100)}
                       if made.family == "decoder" else
                       {"input_ids": torch.full((1, 4), 9), "labels": torch.full((1, 4), -100),
                        "attention_mask": torch.ones(1, 4, dtype=torch.long),
                        "token_type_ids": torch.zeros(1, 4, dtype=torch.long),
                        "sentence_order_label": torch.full((1,), -100)})  # fmt: skip
    found.save(directory, 1, tokenizer=tokenizer)
    folder = export(
        found.objective.network, tokenizer, f"{directory}/model", max_length=32, state=STATE
    )
    return on_first(lambda: files.sha256_file(folder / "model.safetensors"), "digest")


def test_from_shards_and_from_a_checkpoint_without_ranks(tokenizer: str, tmp_path: Path) -> None:
    """zero2 and zero3 give the whole network, and so does what they saved."""
    jobs = [
        (Job(family, "adamw", strategy, steps=0), tokenizer, str(tmp_path / family))
        for family, strategy in (("decoder", "zero3"), ("albert", "zero2"))
    ]
    on_ranks(2, jobs, export_sharded)
    for family in FAMILIES:
        live = tmp_path / family / "model"
        saved = export_checkpoint(str(tmp_path / family), str(tmp_path / f"{family}-saved"))
        for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
            assert (saved / name).read_bytes() == (live / name).read_bytes(), name
        plain = Trained(Job(family, "adamw", "single", steps=0))
        expected = dict(plain.objective.network.named_parameters())
        weights = load_file(saved / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_the_verb(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trained("decoder").save(run, 1, tokenizer=tokenizer)
    assert cli.main(["export", str(run), "--output", str(out)]) == 0
    assert capsys.readouterr().out == f"model: {out}\n"
    assert cli.main(["export", str(run), "--output", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"gristmill: --output '{out}' is there already: give a new folder, or remove it\n"
    )
    one = run / "checkpoints/step-00000001"
    assert cli.main(["export", str(one), "--output", str(tmp_path / "b"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["sha256"]["model.safetensors"] == files.sha256_file(out / "model.safetensors")


def test_what_cannot_be_exported(tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run and no checkpoint: give the folder of"):
        export_checkpoint(str(tmp_path / "none"), str(tmp_path / "out"))
    path = trained("decoder").save(tmp_path / "bare", 1)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        export_checkpoint(str(path), str(tmp_path / "out"))
    run = trained("decoder").save(tmp_path / "run", 1, tokenizer=tokenizer)
    with pytest.raises(UserError, match="'s3://b/out' is a URL"):
        export_checkpoint(str(run), "s3://b/out")
    with (run / checkpoint.STATE_FILE).open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"cannot be used: .* differs from its checksum"):
        export_checkpoint(str(run), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_only_our_networks_are_built(tmp_path: Path) -> None:
    """config.json chooses a class; it must not choose any class of transformers."""
    (tmp_path / "config.json").write_text('{"architectures": ["Trainer"]}')
    with pytest.raises(UserError, match="is of 'Trainer', not of one of AlbertForPreTraining"):
        model_files.network_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="is no configuration of a network"):
        model_files.network_of(tmp_path)
