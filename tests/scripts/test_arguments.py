"""The command line: misspelt words get the closest right one, help loads nothing, extras."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.cli import main
from tests.conftest import REPOSITORY

MISSPELT = {
    "verb": (["trian", "x"], "'gristmill' has no verb 'trian': did you mean 'train'? choose mine"),
    "verb like none": (["xyzzy"], "'gristmill' has no verb 'xyzzy': choose mine, crawl"),
    "action": (["models", "lst"], "'gristmill models' has no action 'lst': did you mean 'list'?"),
    "option": (
        ["export", "run", "--ouput", "x"],
        "'gristmill export' has no option '--ouput': did you mean '--output'? valid here: --help, ",
    ),
    "option with a value": (
        ["mine", "default", "--worker=2"],
        "'gristmill mine' has no option '--worker': did you mean '--workers'?",
    ),
    "option of another action": (
        ["models", "train-tokenizer", "x", "--language", "bn", "--output", "y"],
        "'gristmill models train-tokenizer' has no option '--language': did you mean '--languages'",
    ),
    "Beam's options": (["inspect", "x", "--", "-y"], "'-- -y': only mine passes options to Beam"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = MISSPELT[name]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gristmill: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["mine", "--help"], ["models", "train-tokenizer", "--help"]])
def test_every_option_of_the_help_is_taken(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    shown = {word.strip(",[]") for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert len(shown) > 5
    for option in shown - {"--help"}:
        with pytest.raises(SystemExit):  # the usage, as RECIPE or MANIFEST is missing
            main([*words[:-1], option])
        assert "has no option" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gristmill {version('gristmill')}\n"


def _python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY, capture_output=True, encoding="utf-8", check=True,
    ).stdout  # fmt: skip


_HELP = """
import contextlib, sys
from scripts.cli import main
for words in (["--help"], ["train", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
heavy = {"numpy", "pydantic", "fsspec", "torch", "tokenizers", "apache_beam"}
print(sorted(heavy & {*sys.modules}))
for words in (
    ["evaluate", "/nowhere", "bn-ner"],
    ["evaluate", "/nowhere", "held-out", "--data", "x"],
    ["evaluate", "/nowhere", "bn-nre"],
    ["export", "/nowhere", "--output", "x"],
    ["train", "nowhere"],
):
    print(main(words), "torch" in sys.modules, "tokenizers" in sys.modules)
"""


def test_help_loads_nothing() -> None:
    """Nor does a mistake that can be told without torch, which takes seconds to load."""
    loaded, *mistakes = _python(_HELP).splitlines()[-6:]
    assert loaded == "[]"
    assert mistakes == ["2 False False"] * 5


_WITHOUT_TRAIN = """
import contextlib, io, sys
HIDDEN = {"torch", "transformers", "tokenizers", "datasets", "safetensors", "tensorboard",
          "seqeval", "sklearn"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Hide())
from scripts.cli import main
import pipelines.run, pipelines.mine, scripts.inspection
for words in (
    ["models", "list"],
    ["mine", "default", "--input", "/nowhere", "--output", "/nowhere"],
    ["inspect", "/nowhere"],
    ["train", "albert-small", "--data", "x", "--tokenizer", "x", "--output", "x"],
    ["evaluate", "/nowhere", "held-out", "--data", "x"],
    ["evaluate", "/nowhere", "bn-ner"],
    ["export", "/nowhere", "--output", "x"],
    ["models", "train-tokenizer", "/nowhere", "--output", "x"],
):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    print(code, said.getvalue().count("\\n"), said.getvalue().strip())
"""


def test_without_the_extra_train() -> None:
    listed, mined, inspected, *others = _python(_WITHOUT_TRAIN).splitlines()
    assert listed == "0 0 "
    assert mined.startswith("2 1 gristmill: input '/nowhere' matches no file")
    assert inspected.startswith("2 1 gristmill: nothing at '/nowhere'")
    for line, command in zip(
        others,
        ["train", "evaluate", "evaluate", "export", "models train-tokenizer"],
        strict=True,
    ):
        assert line.startswith("2 1 gristmill: ")
        needs = f"'gristmill {command}' needs the package '"
        # A folder that is not there may be told first.
        assert needs in line or "'/nowhere'" in line
        if needs in line:
            assert line.endswith("which is not installed: pip install 'gristmill[train]'")
    assert sum("pip install 'gristmill[train]'" in line for line in others) >= 2
