"""`gristmill export`: a checkpoint as a folder that transformers opens."""

from __future__ import annotations

import argparse
import json

from models import files
from models.errors import UserError
from training import folders


def export(arguments: argparse.Namespace) -> int:
    """Run the verb; prints the folder, or its files with their SHA-256 as JSON."""
    if not folders.local(arguments.source).is_dir():  # told before torch is loaded
        raise UserError(
            f"'{arguments.source}' is no run and no checkpoint: give the folder of "
            "`gristmill train`, or a folder in its checkpoints/"
        )
    from training.export import export_checkpoint  # noqa: PLC0415

    folder = export_checkpoint(arguments.source, arguments.output)
    if arguments.json:
        digests = {path.name: files.sha256_file(path) for path in sorted(folder.iterdir())}
        print(json.dumps({"directory": str(folder), "sha256": digests}))
    else:
        print(f"model: {folder}")
    return 0
