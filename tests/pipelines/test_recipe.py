"""Recipes: presets, overrides, digests, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import UserError
from pipelines.recipe import MineRecipe, load_recipe, shipped_recipes


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(name, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_shipped_recipes_load() -> None:
    assert {"default", "ccnet", "docs", "sample"} <= set(shipped_recipes())
    for name in shipped_recipes():
        assert load_recipe(name).name == name


def test_presets_are_the_policies_of_the_design() -> None:
    default, ccnet = load_recipe("default"), load_recipe("ccnet")
    assert (default.dedup.scope, default.dedup.keep, default.dedup.common_pages) == (
        "crawl", "first", 100,
    )  # fmt: skip
    assert default.paragraphs.profile == "unicode"
    assert (ccnet.dedup.scope, ccnet.dedup.window_shards, ccnet.dedup.keep) == (
        "window",
        50,
        "none",
    )
    profiles = {ccnet.pages.profile, ccnet.paragraphs.profile, ccnet.language.profile,
                ccnet.quality.profile}  # fmt: skip
    assert profiles == {"ccnet"}
    assert ccnet.pages.min_chars == default.pages.min_chars == 300


def test_overrides() -> None:
    recipe = load_recipe(
        "default",
        ["input.paths=a/*.gz", "dedup.common_pages=7", 'language.allow=["bn", "hi"]', "name=x.y-z"],
    )
    assert recipe.input.paths == ("a/*.gz",)
    assert recipe.dedup.common_pages == 7
    assert recipe.language.allow == ("bn", "hi")
    assert recipe.name == "x.y-z"


def test_extends_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "ccnet"\nname = "mine"\n[dedup]\nwindow_shards = 4\n')
    recipe = load_recipe(str(path))
    assert (recipe.dedup.window_shards, recipe.dedup.keep) == (4, "none")
    path.write_text(f'extends = "{path}"\n')
    assert "extends itself" in refusal(str(path))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("dedup.keep=frist", ["dedup.keep = 'frist'", "'first'"]),
        ("dedup.kep=first", ["unknown key 'dedup.kep'", "did you mean 'keep'", "within_page"]),
        ("langauge.threshold=1", ["unknown key 'langauge'", "did you mean 'language'"]),
        ("language.threshold=2", ["language.threshold = '2'", "less than or equal to 1"]),
        ("language.allow=[\"xx\"]", ["'xx'"]),
        ("dedup.ranges=3", ["'3'", "power of two"]),
        ("dedup.keep=none", ["dedup.common_pages = '100'", "keep = 'first'"]),
        ("dedup.index_in=x", []),
        ("quality.percentiles=[60, 30]", ["[60, 30]", "rise"]),
        ("dedup", ["'dedup'", "section.field=value"]),
        ("name.x=1", ["'name' is a value"]),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(override: str, parts: list[str]) -> None:
    if not parts:
        load_recipe("default", [override])  # an index with scope = "crawl" is fine
        text = refusal("default", override, "dedup.scope=shard")
        assert "dedup.scope = 'shard'" in text
        return
    text = refusal("default", override)
    for part in parts:
        assert part in text, text


def test_extends_is_looked_for_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[pages]\nmin_chars = 7\n")
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n')
    assert load_recipe(str(child)).pages.min_chars == 7
    child.write_text('extends = "nosuch"\n')
    text = refusal(str(child))
    assert "child.toml' extends 'nosuch'" in text


def test_unknown_recipe_and_bad_toml(tmp_path: Path) -> None:
    text = refusal("no-such")
    assert "'no-such'" in text
    assert "'default'" in text
    path = tmp_path / "bad.toml"
    path.write_text("[dedup\n")
    assert "not valid TOML" in refusal(str(path))
    path.write_text("extends = 3\n")
    assert "extends = '3'" in refusal(str(path))


def test_digest_is_of_what_changes_bytes() -> None:
    base = load_recipe("default").digest()
    for override in ("run.workers=2", "output.directory=x", "input.paths=x", "name=y",
                     "run.keep_staging=true"):  # fmt: skip
        assert load_recipe("default", [override]).digest() == base
    for override in ("dedup.common_pages=9", "output.compression_level=4", "pages.min_chars=1",
                     "dedup.index_in=x", "quality.models=x", "input.num_shards=2"):  # fmt: skip
        assert load_recipe("default", [override]).digest() != base


def test_no_place_of_this_machine_is_published() -> None:
    recipe = MineRecipe.model_validate(
        {"output": {"directory": "/secret/out"}, "run": {"staging": "/secret/staging"},
         "dedup": {"index_in": "/secret/index"}, "quality": {"models": "/secret/lm"}}
    )  # fmt: skip
    assert "secret" not in str(recipe.published())
