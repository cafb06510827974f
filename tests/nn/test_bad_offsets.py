"""Offsets and lengths that nobody looked at before the kernels did. The references trust them."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, make_collection

pytestmark = pytest.mark.public
TABLES = [te.TableConfig("user", 10, 4, features=["u", "shared"]), te.TableConfig("genre", 5, 2, features=["shared"])]


def unchecked(keys, values, lengths=None, offsets=None) -> te.KeyedJaggedTensor:
    """A batch whose contents are only looked at by the kernels, as on a GPU."""
    batch = te.KeyedJaggedTensor(keys, values[:0], offsets=torch.zeros(1 + len(keys), dtype=torch.int64))
    if offsets is None:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    batch._values, batch._lengths, batch._offsets = values, lengths, offsets
    return batch


@pytest.fixture(autouse=True)
def _by_kernels(request):
    if request.config.getoption("--kernels") == "reference":
        pytest.skip("references do not check offsets")


DESCENDING = "offsets must ascend: feature"


BAD_OFFSETS = {
    "offsets must start with 0, got 1": [1, 1, 2, 3, 4],
    "offsets end at 3 but there are 4 values": [0, 1, 2, 3, 3],
    "offsets end at 9 but there are 4 values": [0, 1, 2, 3, 9],
    f"{DESCENDING} 'u', sample 1 goes from 3 to 2": [0, 3, 2, 3, 4],
    f"{DESCENDING} 'shared', sample 0 goes from 2 to -7": [0, 1, 2, -7, 4],
    f"{DESCENDING} 'shared', sample 1 goes from 9 to 4": [0, 1, 2, 9, 4],
}


@pytest.mark.parametrize("optimizer", [None, te.optim.Adagrad()], ids=["plain", "fused"])
@pytest.mark.parametrize("message", BAD_OFFSETS)
def test_kernels_check_offsets_that_nobody_looked_at(message, optimizer):
    collection = make_collection(TABLES, optimizer)
    before = contents(collection)
    values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor(BAD_OFFSETS[message])
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            collection(unchecked(["u", "shared"], values, offsets=offsets.to(dtype)))
    assert_same_bits(contents(collection), before)


def test_lengths_that_nobody_looked_at():
    collection = make_collection(TABLES, te.optim.Adam())
    values = torch.tensor([1, 2, 3, 4])
    with pytest.raises(ValueError, match="offsets must ascend: feature 'u', sample 1 goes from 3 to 1"):
        collection(unchecked(["u", "shared"], values, lengths=torch.tensor([3, -2, 2, 1])))
    with pytest.raises(ValueError, match="offsets end at 5 but there are 4 values"):
        collection(unchecked(["u", "shared"], values, lengths=torch.tensor([1, 1, 1, 2])))
