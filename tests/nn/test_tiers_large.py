"""A table of 200 GB on disk is trained in the memory of its cache."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import INTERPRETED

# A cache of 5 thousand rows of 129 floats, and 21 bytes for each slot: 3 MB.
PROGRAM = """
import resource, sys, tempfile
import torch, tritonemb as te
from tritonemb.types import CacheConfig

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

rows = 5_000
def train(num_embeddings, placement, cached):
    cache = CacheConfig(rows=cached, folder=sys.argv[1])
    table = te.TableConfig("t", num_embeddings, 128, placement=placement, cache=cache)
    collection = te.nn.EmbeddingBagCollection([table], optimizer=te.optim.RowWiseAdagrad(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        ids = torch.randint(num_embeddings, (2048,), generator=generator)
        batch = te.KeyedJaggedTensor(["t"], ids, lengths=torch.full((512,), 4))
        collection(batch).sum().backward()
    return collection

train(10_000, "disk", 64)  # what every training needs
before = peak()
collection = train(400_000_000, "disk", rows)
used, budget = peak() - before, rows * (129 * 4 + 21)
assert collection.cache_statistics()["t"].evictions > 0
assert used < budget + 500 * 2**20, f"{used / 2**20:.0f} MiB for a cache of {budget / 2**20:.0f} MiB"
print("used", used, "budget", budget)
"""


@pytest.mark.skipif(INTERPRETED, reason="says nothing of kernels, and would take hours")
@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
@pytest.mark.more
def test_a_table_larger_than_memory_is_trained_in_that_of_its_cache(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "used" in done.stdout
