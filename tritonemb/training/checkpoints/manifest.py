"""The file in which a checkpoint says of itself all that is no tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        _, found = dict(manifest["files"]), manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}); use another checkpoint") from error
    if found != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {found}, this version of tritonemb reads format {FORMAT}; it was written by "
            f"tritonemb {manifest.get('versions', {}).get('tritonemb', 'of an unknown version')}"
        )
    assert isinstance(manifest, dict)
    return text, manifest
