"""The file in which a checkpoint says of itself all that is no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
MANIFEST = "trainer.json"


def read_text(path: Path) -> tuple[str, dict[str, Any]]:
    """A checkpoint's manifest, as text and as it was.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or of a format that this version cannot read.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}")
    try:
        text = (path / MANIFEST).read_text()
        manifest = json.loads(text)
        files, found = dict(manifest["files"]), manifest["format"]
        _check_tables(manifest.get("tables", {}), files)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}); use another checkpoint") from error
    if found != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {found}, this version of tritonemb reads format {FORMAT}; it was written by "
            f"tritonemb {manifest.get('versions', {}).get('tritonemb', 'of an unknown version')}"
        )
    assert isinstance(manifest, dict)
    return text, manifest


def _check_tables(tables: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Raise whatever goes wrong when one reads what is said of tables on disk."""
    for said in tables.values():
        for part in said["parts"]:
            _, _, _, _ = part["table"], part["snapshot"], float(part["bound"]), files[part["files"][0]]
            for first, count in (part["rows"], part["columns"], *(files[name] for name in part["files"])):
                _, _ = int(first), int(count)
        for dtype, size in said["fields"].values():
            _, _ = getattr(torch, dtype), torch.Size(size)
