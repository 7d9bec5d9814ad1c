"""The mining recipe: one TOML file, validated into one frozen model.

A recipe names only what differs from the recipe that it `extends`; what nobody sets has the
default below. Everything that can change an output byte is part of `MineRecipe.digest`; where
the output goes and how many processes work on it is not.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from models import files
from models.languages import check_codes
from pipelines import recipe_file
from pipelines.recipe_file import Section, Texts

MAX_COMMON_PAGES = 65_535
"""Page counts are kept in 16 bits."""
CUTOFFS_OF_RUN = "run"
MIB = 1 << 20


class Input(Section):
    """Which WET files, and how they are grouped."""

    paths: Texts = Field(
        (), description="WET files: paths, globs, fsspec URLs, or crawl manifests (*.json)"
    )
    num_shards: int | None = Field(
        None, ge=1, description="group the files into this many shards, as CCNet does"
    )
    max_failed_shards: int | str = Field(
        "1%", description="inputs that may fail, a number or 'P%'; more: no manifest, exit 1"
    )

    @field_validator("max_failed_shards")
    @classmethod
    def _number_or_percentage(cls, value: int | str) -> int | str:
        text = str(value)
        if re.fullmatch(r"\d+", text):
            return int(text)
        if re.fullmatch(r"\d+(\.\d+)?%", text) and float(text[:-1]) <= 100:
            return text
        raise ValueError(
            f"input.max_failed_shards = '{value}' is neither a number of files, as 3, "
            "nor a percentage of them, as '0.5%'"
        )

    def failed_shards_allowed(self, inputs: int) -> int:
        """How many of so many inputs may fail; a percentage is rounded down."""
        if isinstance(self.max_failed_shards, int):
            return self.max_failed_shards
        return int(Fraction(self.max_failed_shards[:-1]) * inputs / 100)


class Output(Section):
    """Where the Parquet shards go, and how large they are."""

    directory: str = Field("", description="folder or fsspec URL of the mined crawl")
    target_bytes: int = Field(256 * MIB, ge=1, description="text bytes in one Parquet file, about")
    compression_level: int = Field(3, ge=1, le=19, description="zstd level")
    drops: bool = Field(False, description="write drops.parquet: each dropped page, its reason")


class Pages(Section):
    """From a record to a page that enters the pipeline."""

    profile: Literal["default", "ccnet"] = Field(
        "default", description="'ccnet' takes the first line out as the title"
    )
    min_chars: int = Field(300, ge=0, description="shortest page before dedup, code points")
    min_chars_after: int = Field(0, ge=0, description="shortest page after dedup, code points")
    max_unreadable: float = Field(
        0.05, ge=0, le=1, description="largest share of U+FFFD and control characters"
    )


class Paragraphs(Section):
    """What makes two paragraphs the same."""

    profile: Literal["unicode", "ccnet"] = Field("unicode", description="key normalisation")


class Dedup(Section):
    """Which copies of a paragraph stay."""

    scope: Literal["crawl", "window", "shard"] = Field(
        "crawl", description="where a second copy counts"
    )
    window_shards: int = Field(50, ge=1, description="consecutive shards in a window")
    keep: Literal["first", "none"] = Field(
        "first", description="'none': a paragraph of two pages goes everywhere (CCNet)"
    )
    common_pages: int | None = Field(
        None, ge=2, le=MAX_COMMON_PAGES,
        description="a paragraph on this many pages is boilerplate and goes everywhere",
    )  # fmt: skip
    within_page: Literal["first", "all"] = Field(
        "first", description="'all': repeats inside one page stay"
    )
    ranges: int | None = Field(
        None, ge=1, le=4096,
        description="parts of the 64-bit space, a power of two; by default from the input's size",
    )  # fmt: skip
    index_in: str | None = Field(None, description="folder with the index of earlier crawls")
    index_out: str | None = Field(None, description="folder for the index with this crawl in it")

    @model_validator(mode="after")
    def _possible(self) -> Dedup:
        if self.ranges is not None and self.ranges & (self.ranges - 1):
            raise ValueError(f"dedup.ranges = '{self.ranges}' is not a power of two")
        if self.common_pages is not None and self.keep != "first":
            raise ValueError(
                f"dedup.common_pages = '{self.common_pages}' needs dedup.keep = 'first': "
                "with 'none' a paragraph of two pages goes already"
            )
        if self.scope != "crawl" and (self.index_in or self.index_out):
            raise ValueError(
                f"dedup.scope = '{self.scope}' has no use for an index: "
                "set dedup.scope = 'crawl', or leave out index_in and index_out"
            )
        return self


class Language(Section):
    """Language identification."""

    model: str = Field("lid.176.ftz", description="registered name, or a path")
    profile: Literal["default", "ccnet"] = Field(
        "default", description="'ccnet' deletes line breaks and rounds the score"
    )
    threshold: float = Field(0.5, ge=0, le=1, description="lowest score")
    max_chars: int | None = Field(None, ge=1, description="characters looked at; none: all")
    keep_undetermined: bool = Field(False, description="keep pages below the threshold as 'und'")
    allow: Texts = Field((), description="language codes to keep; none: all")
    deny: Texts = Field((), description="language codes to drop")

    @model_validator(mode="after")
    def _known(self) -> Language:
        both = sorted(set(check_codes(self.allow)) & set(check_codes(self.deny)))
        if both:
            raise ValueError(f"language '{both[0]}' stands in both language.allow and .deny")
        return self


class Quality(Section):
    """Perplexity, and the buckets head, middle and tail."""

    models: str | None = Field(
        None, description="folder with {language}.sp.model and {language}.arpa.bin; none: no score"
    )
    profile: Literal["unicode", "ccnet"] = Field("unicode", description="scoring")
    min_chars: int = Field(100, ge=0, description="a shorter page is not scored, code points")
    cutoffs: str = Field(
        CUTOFFS_OF_RUN,
        description="'run': this run's own percentiles; or a file like CCNet's cutoff.csv",
    )
    percentiles: tuple[int, int] = Field((30, 60), description="where head and middle end")

    @model_validator(mode="after")
    def _ordered(self) -> Quality:
        low, high = self.percentiles
        if not 0 < low < high < 100:
            raise ValueError(f"quality.percentiles = '[{low}, {high}]' must rise between 0 and 100")
        if self.cutoffs != CUTOFFS_OF_RUN and self.models is None:
            raise ValueError(
                f"quality.cutoffs = '{self.cutoffs}' has nothing to cut: set quality.models too"
            )
        return self


class Run(Section):
    """How the work is done: nothing here changes an output byte."""

    workers: int = Field(1, ge=1, description="local processes")
    staging: str | None = Field(
        None, description="folder for intermediate files; none: below the output"
    )
    keep_staging: bool = Field(False, description="leave the intermediate files")
    exchange: Literal["auto", "files", "shuffle"] = Field(
        "auto",
        description="how paragraph keys meet: read from the key files, or through Beam's shuffle",
    )


class MineRecipe(Section):
    """Everything `gristmill mine` needs to know."""

    name: str = Field("mine", pattern=r"^[\w.-]+$", description="name of the recipe")
    input: Input = Input()
    output: Output = Output()
    pages: Pages = Pages()
    paragraphs: Paragraphs = Paragraphs()
    dedup: Dedup = Dedup()
    language: Language = Language()
    quality: Quality = Quality()
    run: Run = Run()

    def published(self) -> dict[str, Any]:
        """The recipe as the manifest shows it: without places on this machine."""
        recipe = self.model_dump(
            mode="json",
            exclude={
                "run": True,
                "input": {"paths", "max_failed_shards"},
                "output": {"directory"},
                "language": {"model"},
            },
        )
        for key in ("index_in", "index_out"):
            recipe["dedup"][key] = bool(recipe["dedup"][key])
        recipe["quality"]["models"] = bool(recipe["quality"]["models"])
        if recipe["quality"]["cutoffs"] != CUTOFFS_OF_RUN:
            recipe["quality"]["cutoffs"] = "file"
        return recipe

    def digest(self) -> str:
        """XXH3 of the settings that can change an output byte (32 hex digits).

        Files that the recipe names (inputs, models, cutoffs, index) count by their content, in
        `Plan.digest`.
        """
        recipe = self.published()
        del recipe["name"]
        return files.xxh3_bytes(json.dumps(recipe, sort_keys=True).encode())

    def staging_directory(self) -> str:
        """Where the intermediate files go: a folder of this output's own, removed at the end."""
        if self.run.staging is None:
            return files.join(self.output.directory, ".staging")
        place = self.output.directory
        if files.is_local(place):
            place = str(files.local_path(place).resolve())
        own = files.xxh3_bytes(place.encode())[:16]
        return files.join(self.run.staging, f"gristmill-{own}")


def shipped_recipes() -> list[str]:
    """Names of the mining recipes that come with Gristmill."""
    return recipe_file.shipped("mine")


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> MineRecipe:
    """Read a recipe by path or shipped name, apply `a.b=value` overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return recipe_file.load(MineRecipe, "mine", name_or_path, overrides or [])
