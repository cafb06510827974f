"""Offsets and lengths that nobody looked at before the kernels did. The references trust them."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, output_of
from tests.nn.tiers import not_interpreted, seeded
from tests.strategies import random_batch

pytestmark = pytest.mark.public
TABLES = [te.TableConfig("user", 10, 4, features=["u", "shared"]), te.TableConfig("genre", 10, 2, features=["shared"])]
UNPOOLED = [te.TableConfig(name, 10, 4, pooling="none") for name in ("u", "shared")]
DESCENDING = "offsets must ascend: feature"
BAD_OFFSETS = {
    "offsets must start with 0, got 1": [1, 1, 2, 3, 4],
    "offsets end at 3 but there are 4 values": [0, 1, 2, 3, 3],
    "offsets end at 9 but there are 4 values": [0, 1, 2, 3, 9],
    f"{DESCENDING} 'u', sample 1 goes from 3 to 2": [0, 3, 2, 3, 4],
    f"{DESCENDING} 'shared', sample 0 goes from 2 to -7": [0, 1, 2, -7, 4],
    f"{DESCENDING} 'shared', sample 1 goes from 9 to 4": [0, 1, 2, 9, 4],
    f"{DESCENDING} 'u', sample 1 goes from 3 to 1": [0, *torch.tensor([3, -2, 2, 1]).cumsum(0).tolist()],
}


@pytest.fixture(autouse=True)
def _by_kernels(request):
    if request.config.getoption("--kernels") == "reference":
        pytest.skip("references do not check offsets")


@pytest.mark.parametrize("optimizer", [None, te.optim.Adagrad()], ids=["plain", "fused"])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("placement", ["device", pytest.param("host", marks=not_interpreted)])
@pytest.mark.parametrize("message", BAD_OFFSETS)
def test_kernels_check_offsets_that_nobody_looked_at(message, placement, pooled, optimizer):
    collection = seeded(TABLES if pooled else UNPOOLED, optimizer, pooled, (placement,))
    initial = contents(collection)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor(BAD_OFFSETS[message], dtype=dtype)
        batch = te.KeyedJaggedTensor.unchecked(["u", "shared"], torch.tensor([1, 2, 3, 4]), None, offsets)
        for use in (output_of, type(collection).group) if optimizer else (output_of,):
            with pytest.raises(ValueError, match=message):
                use(collection, batch)
    assert_same_bits(contents(collection), initial)
    if optimizer:
        output_of(collection, random_batch({"u": 10, "shared": 10}, ["u", "shared"], 4, 3)).sum().backward()
        assert int(collection.step) == 1
