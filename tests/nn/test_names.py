"""Any name that is allowed is told and trained as any other, whatever characters it has."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, fewer
from tests.nn.tiers import ELSEWHERE, outputs_of, same, seeded, varied_steps

pytestmark = pytest.mark.public
CUT = ["a\rb", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1db", "a\x1eb", "a\x85b", "a\u2028b", "a\u2029b"]  # by `splitlines`
ADAM = te.optim.Adam(lr=0.1)
SIZES = fewer((20,), (3,))
BROKEN = "one\ntwo"  # a key that no table can have
LIKE_LANES = [
    te.TableConfig("c", 40, 4, features=["a of b", "a", "c.a", "b of c.a"]),
    te.TableConfig("b of c", 40, 4, features=["a", "b of c.a", "a of b of c"]),
]


def accumulated(collection, steps):
    with collection.accumulate():
        return outputs_of(collection, steps)


@pytest.mark.parametrize("name", CUT, ids=ascii)
def test_what_is_wrong_is_told_of_the_right_table_and_feature(name):
    tables = [te.TableConfig(name, 100, 4, features=["u" + name]), te.TableConfig("second", 10, 4)]
    collection = seeded(tables, te.optim.Adam(lr=0.1, on_nonfinite="raise"))
    keys = ["u" + name, "second"]
    for ids, messages in (([1, 50], ("second", "second")), ([100, 1], (name, "u" + name))):
        with pytest.raises(ValueError, match="out of range") as caught:
            collection(te.KeyedJaggedTensor(keys, torch.tensor(ids), lengths=torch.tensor([1, 1])))
        table, feature = messages
        assert f"table {table!r}: id {max(ids)} of feature {feature!r}, sample 0" in str(caught.value)
    batch = te.KeyedJaggedTensor(keys, torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="NaN or infinite") as caught:
        collection(batch).backward(torch.tensor([[0.0] * 4 + [torch.inf] * 4]))
    assert "table 'second': the gradient of row 2 is" in str(caught.value)


@pytest.mark.parametrize("placement", ["device", *ELSEWHERE])
@pytest.mark.parametrize("name", fewer([CUT[0], CUT[-1]], CUT[-1:]), ids=ascii)
def test_features_of_any_name_are_accumulated(name, placement):
    def made(names):
        tables = [te.TableConfig("t", 60, 4, features=names[:2]), te.TableConfig("s", 60, 4, features=names[1:])]
        return seeded(tables, ADAM, placements=(placement,))

    renamed, twin = made(["x" + name, name, name + "x"]), made(["first", "second", "third"])
    steps, peers = (varied_steps(collection, 3, sizes=SIZES) for collection in (renamed, twin))
    same(accumulated(renamed, steps), accumulated(twin, peers))
    assert_same_bits(contents(renamed), contents(twin))


@pytest.mark.parametrize("train", [outputs_of, accumulated])
def test_features_that_look_like_others_of_other_tables(train, placement):
    renamed, twin = (seeded(LIKE_LANES, ADAM, placements=(where,)) for where in (placement, "device"))
    steps = varied_steps(twin, 3, sizes=SIZES)
    same(train(renamed, steps), train(twin, steps))
    assert_same_bits(contents(renamed), contents(twin))


@pytest.mark.parametrize("placement", ["device", *ELSEWHERE])
@pytest.mark.parametrize("train", [outputs_of, accumulated])
def test_a_key_of_several_lines_that_nobody_looks_up(train, placement):
    """Of a batch that nobody has checked, too: TorchRec's, or one that was rebuilt from its tensors."""
    tables = [te.TableConfig("t", 60, 4), te.TableConfig("s", 60, 4)]
    renamed, twin = (seeded(tables, ADAM, placements=(where,)) for where in (placement, "device"))
    steps = varied_steps(twin, 2, sizes=SIZES)
    broken = [
        (te.KeyedJaggedTensor([BROKEN, *batch.keys()[1:]], batch.values(), offsets=batch.offsets()), grad)
        for batch, grad in steps
    ]
    same(train(renamed, broken), train(twin, steps))
    assert_same_bits(contents(renamed), contents(twin))
    ids = te.KeyedJaggedTensor([BROKEN, "s", "t"], torch.tensor([0, 0, 60]), lengths=torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match="table 't': id 60 of feature 't', sample 0"):
        renamed(ids)
