"""Tables past 2^31 elements, where a 32-bit offset would wrap."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import train

pytestmark = [pytest.mark.gpu, pytest.mark.more]

DIM = 64
NUM_ROWS = 2**31 // DIM + 1000
LAST = NUM_ROWS - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_behind_two_billion_elements(dtype):
    needed = NUM_ROWS * (DIM * dtype.itemsize + 4) + (1 << 30)
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, there are {free >> 30}")
    configs = [
        te.TableConfig("small", 10, DIM, dtype=dtype, init=torch.nn.init.zeros_),
        te.TableConfig("large", NUM_ROWS, DIM, dtype=dtype, init=torch.nn.init.zeros_),
    ]
    collection = te.nn.EmbeddingBagCollection(configs, te.optim.SGD(lr=1.0), device="cuda", output_dtype=torch.float32)
    weight = collection.tables[1].weight
    with torch.no_grad():
        weight[LAST], weight[0], weight[LAST - NUM_ROWS // 2] = 2.0, 3.0, 5.0
    lists = {"small": [[0], [9], []], "large": [[LAST], [0, LAST], [LAST - NUM_ROWS // 2]]}
    batch = te.KeyedJaggedTensor.from_lists(lists, device="cuda")
    out = collection(batch)
    assert out[:, DIM:].tolist() == [[2.0] * DIM, [5.0] * DIM, [5.0] * DIM]
    train(collection, [(batch, torch.ones_like(out))])
    te.check_errors()
    assert weight[LAST].tolist() == [0.0] * DIM
    assert weight[0].tolist() == [2.0] * DIM
    assert weight[LAST - NUM_ROWS // 2].tolist() == [4.0] * DIM
    changed = [row for row in (1, 2**25, LAST - 1, LAST - 2**25) if weight[row].any()]
    assert changed == []
