"""WET -> paragraph dedup -> language -> Parquet with datatrove; `bench_peers` runs this.

It runs in datatrove's own virtual environment, one process, its three stages one after another.
Settings are the fastest that still do the work: lines instead of sentences, one finder, a large
read buffer, only the best language, no content-defined chunks in the Parquet files.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    """Mine the files of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shards", type=Path, required=True, help="folder of WET files, no other")
    parser.add_argument("--model", type=Path, required=True, help="fastText language model")
    parser.add_argument("--work", type=Path, required=True, help="empty folder")
    parsed = parser.parse_args()
    # Read when datatrove is imported. It takes the model through a cache; a path is copied there.
    os.environ["HF_ASSETS_CACHE"] = str(parsed.work / "assets")
    run(parsed.shards, parsed.model, parsed.work)


def run(shards: Path, model: Path, work: Path) -> None:
    """Write `work/out/*.parquet`."""
    # ruff: noqa: PLC0415 - after the environment is set, and absent from Gristmill's own
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]
    from datatrove.pipeline.dedup.sentence_dedup import (  # type: ignore[import-not-found]
        SentDedupConfig,
        SentenceDedupFilter,
        SentenceDedupSignature,
        SentenceFindDedups,
    )
    from datatrove.pipeline.filters import LanguageFilter  # type: ignore[import-not-found]
    from datatrove.pipeline.readers import WarcReader  # type: ignore[import-not-found]
    from datatrove.pipeline.writers import ParquetWriter  # type: ignore[import-not-found]
    from datatrove.utils.lid import FT176LID  # type: ignore[import-not-found]
    from datatrove.utils.word_tokenizers import (  # type: ignore[import-not-found]
        WhitespaceTokenizer,
    )

    # Its default key: lower case, no accents, digits, punctuation, as CCNet's and Gristmill's.
    config = SentDedupConfig(
        n_sentences=1, split_sentences=False, min_doc_words=0, min_num_sentences=0
    )
    tokenizer = WhitespaceTokenizer()  # lines need none; the default one would load spaCy
    FT176LID.MODEL_URL = str(model)
    language = LanguageFilter(label_only=True)
    language.model = FT176LID(k=1)  # its own default asks for the scores of all 176 languages
    tasks = len(list(shards.iterdir()))
    stages = {
        "signatures": (
            tasks,
            [
                WarcReader(str(shards)),
                SentenceDedupSignature(str(work / "signatures"), config=config, language=tokenizer),
            ],
        ),
        "find": (
            1,
            [
                SentenceFindDedups(
                    str(work / "signatures"),
                    str(work / "duplicates"),
                    config=config,
                    lines_to_buffer=100_000,
                )
            ],
        ),
        "filter": (
            tasks,
            [
                WarcReader(str(shards)),
                SentenceDedupFilter(str(work / "duplicates"), config=config, language=tokenizer),
                language,
                ParquetWriter(str(work / "out"), use_content_defined_chunking=False),
            ],
        ),
    }
    for name, (count, steps) in stages.items():
        LocalPipelineExecutor(
            steps, tasks=count, workers=1, logging_dir=str(work / "logs" / name)
        ).run()


if __name__ == "__main__":
    main()
