"""WET -> paragraph dedup and language -> JSON lines with dolma; `bench_peers` runs this.

It runs in dolma's own virtual environment, one process. dolma has no reader of WET: the first
step here, with FastWARC, writes the pages as the JSON lines that it takes. Settings are the
fastest that still do the work: dedup and language both look at the text as it came, so that it is
rewritten once; only the best language; zstd files; no shuffle; the tagger in this process.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

FALSE_POSITIVES = 1e-4  # of the Bloom filter: so many paragraphs go though they are new


def main() -> None:
    """Mine the files of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shards", type=Path, required=True, help="folder of WET files, no other")
    parser.add_argument("--model", type=Path, required=True, help="fastText language model")
    parser.add_argument("--work", type=Path, required=True, help="empty folder")
    parsed = parser.parse_args()
    paragraphs = sum(
        convert(shard, parsed.work / "documents" / f"{shard.name.split('.')[0]}.jsonl.zst")
        for shard in sorted(parsed.shards.iterdir())
    )
    run(parsed.model, parsed.work, paragraphs)


def convert(shard: Path, target: Path) -> int:
    """Write the pages of a WET file as JSON lines; returns their number of lines of text."""
    # ruff: noqa: PLC0415 - what dolma's environment has, and Gristmill's may not
    import msgspec  # type: ignore[import-not-found, unused-ignore]
    import zstandard
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    encode = msgspec.json.Encoder().encode
    paragraphs = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        shard.open("rb") as source,
        zstandard.open(target, "wb", cctx=zstandard.ZstdCompressor(level=1)) as file,
        io.BufferedWriter(file, 1 << 20) as lines,
    ):
        for record in ArchiveIterator(
            source, record_types=WarcRecordType.conversion, parse_http=False
        ):
            text = record.reader.read().decode("utf-8", "replace")
            paragraphs += text.count("\n") + 1
            page = {
                "id": record.record_id,
                "text": text,
                "source": "wet",
                "metadata": {"url": record.headers.get("WARC-Target-URI")},
            }
            lines.write(encode(page) + b"\n")
    return paragraphs


def run(model: Path, work: Path, paragraphs: int) -> None:
    """Tag, find duplicates, mix: `work/documents` to `work/out/*.zst`."""
    import dolma  # type: ignore[import-not-found]
    from dolma.core.runtime import create_and_run_tagger  # type: ignore[import-not-found]
    from dolma.taggers.language import (  # type: ignore[import-not-found]
        FastTextAllLanguagesDocumentTagger,
    )

    @dolma.add_tagger("language")  # type: ignore[untyped-decorator, unused-ignore]
    class Language(FastTextAllLanguagesDocumentTagger):  # type: ignore[misc]
        """dolma's own tagger, with this model; its default asks for all 176 scores."""

        MODEL_PATH = str(model)

        def predict_text(self, text: str) -> list[tuple[str, float]]:
            line = text.lower().replace("\n", " ").strip()
            labels, scores = self.classifier.predict(line, k=1)
            return [
                (label.replace("__label__", ""), float(score))
                for label, score in zip(labels, scores, strict=True)
            ]

    documents = [str(work / "documents" / "*.zst")]
    scratch = {"input": str(work / "input"), "output": str(work / "output")}
    for folder in scratch.values():
        Path(folder).mkdir()
    create_and_run_tagger(
        documents=documents,
        taggers=["language"],
        experiment="language",
        metadata=str(work / "metadata"),
        debug=True,  # in this process, without a pool
    )
    dolma.deduper(
        {
            "documents": documents,
            "work_dir": scratch,
            "processes": 1,
            "is_s3_volume": False,
            "compression": {"input": None, "output": None},
            "dedupe": {
                "name": "duplicates",
                "paragraphs": {"attribute_name": "duplicates", "paragraph_separator": "\n"},
                "skip_empty": True,
                "min_length": 0,
                "min_words": 0,
                "num_partitions": 1,
                "partition_index": 0,
                "file_partition": False,
                "document_dir": "documents",
            },
            "bloom_filter": {
                "file": str(work / "bloom"),
                "read_only": False,
                "size_in_bytes": 0,
                "estimated_doc_count": paragraphs,
                "desired_false_positive_rate": FALSE_POSITIVES,
            },
        }
    )
    dolma.mixer(
        {
            "work_dir": scratch,
            "processes": 1,
            "shuffle": False,
            "streams": [
                {
                    "name": "mined",
                    "documents": documents,
                    "attributes": ["language", "duplicates"],
                    "compression": {"input": None, "output": "zst"},
                    "output": {
                        "path": str(work / "out"),
                        "max_size_in_bytes": 2**31,
                        "min_text_length": 1,
                    },
                    "span_replacement": [
                        {
                            "span": "$.attributes.duplicates",
                            "min_score": 0.5,
                            "replacement": "",
                            "syntax": "jsonpath",
                        }
                    ],
                }
            ],
        }
    )


if __name__ == "__main__":
    main()
