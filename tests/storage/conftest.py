"""What tests of storage share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.stores import mount


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if problem := mount(disk, "1m"):
        pytest.skip(problem)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
