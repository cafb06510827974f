import pytest
import torch

from tritonemb.data import Column, Dataset, Feature, Rows

BAGS = [[1, 2, 3], [], [4], [0, 5], [2]]


def jagged(bags: list[list[int]]) -> Column:
    lengths = torch.tensor([0] + [len(bag) for bag in bags])
    return Column(torch.tensor([id for bag in bags for id in bag], dtype=torch.int32), lengths.cumsum(0))


def rows(num_rows: int = 5, bags: list[list[int]] | None = None) -> Rows:
    single = Column(torch.arange(num_rows, dtype=torch.int32))
    many = jagged((BAGS if bags is None else bags)[:num_rows])
    return Rows(torch.arange(num_rows * 2.0).reshape(num_rows, 2), (single, many), torch.arange(num_rows) % 2.0)


def with_offsets(*offsets: int) -> Rows:
    single, many = rows().columns
    return Rows(rows().dense, (single, Column(many.values, torch.tensor(offsets))), rows().labels)


def dataset(**changes: object) -> Dataset:
    features = (Feature("one", 5), Feature("many", 6, multi_hot=True))
    return Dataset(**({"name": "tiny", "features": features, "train": rows(), "test": rows()} | changes))


def test_slice_of_a_slice_keeps_bags():
    column = jagged(BAGS).slice(1, 5).slice(1, 4)
    assert (column.values.tolist(), column.offsets.diff().tolist()) == ([4, 0, 5, 2], [1, 2, 1])


def test_batches_in_order_cover_every_row_once():
    batches = list(dataset().open("test", 2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    lists = [batch.sparse.to_lists() for batch in batches]
    assert [id for part in lists for bag in part["one"] for id in bag] == [0, 1, 2, 3, 4]
    assert [bag for part in lists for bag in part["many"]] == BAGS
    assert torch.equal(torch.cat([batch.dense for batch in batches]), rows().dense)


def test_shuffled_rows_stay_together():
    for batch in dataset().open("train", 2, seed=3, epoch=1, shuffle=True):
        lists = batch.sparse.to_lists()
        for sample, (row,) in enumerate(lists["one"]):
            assert lists["many"][sample] == BAGS[row]
            assert batch.dense[sample].tolist() == [2.0 * row, 2.0 * row + 1]
            assert batch.labels[sample].item() == row % 2


def test_shuffling_follows_seed_and_epoch():
    many = Rows(torch.zeros(100, 2), (Column(torch.arange(100)),), torch.zeros(100))
    data = Dataset("line", (Feature("id", 100),), many, many)

    def order(seed: int, epoch: int) -> list[int]:
        batches = data.open("train", 7, seed=seed, epoch=epoch, shuffle=True)
        return [id for batch in batches for id in batch.sparse.values().tolist()]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert sorted(order(1, 2)) == list(range(100))


def test_tables_average_multi_hot_features():
    one, many = dataset().tables(8)
    assert (one.name, one.num_embeddings, one.embedding_dim, one.pooling) == ("one", 5, 8, "sum")
    assert (many.name, many.num_embeddings, many.pooling) == ("many", 6, "mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": (Feature("one", 4), Feature("many", 6, True))}, r"'one' has ids from 0 to 4.*\[0, 4\)"),
        ({"features": (Feature("one", 5),)}, "train rows: 2 columns for 1 features"),
        ({"test": rows().slice(0, 0)}, "test rows: no rows"),
        (
            {"test": Rows(rows().dense, (Column(torch.rand(5)), jagged(BAGS)), rows().labels)},
            "test rows: feature 'one' has torch.float32 ids, not integers",
        ),
        ({"test": rows(bags=[[1], [-1], [], [], []])}, "test rows.*'many' has ids from -1"),
        *(
            ({"test": with_offsets(*offsets)}, "test rows: offsets of feature 'many' must ascend from 0 to 7")
            for offsets in ((1, 3, 3, 4, 6, 7), (0, 3, 3, 4, 6, 8), (0, 3, 2, 4, 6, 7))
        ),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(**changes)


@pytest.mark.parametrize("label", [-1.0, 0.5, 2.0, float("nan")])
@pytest.mark.parametrize("split", ["train", "test", "validation"])
def test_labels_that_are_neither_0_nor_1_are_refused(split, label):
    good = rows()
    labels = good.labels.clone()
    labels[3:] = label
    with pytest.raises(ValueError, match=rf"'tiny', {split} rows: the label of row 3 is {label}, expected 0 or 1"):
        dataset(**{split: Rows(good.dense, good.columns, labels)})


def test_the_encoding_follows_names_and_sizes():
    features = dataset().features
    encoding = dataset().encoding
    assert encoding == dataset(name="other", train=rows().slice(1, 4)).encoding
    assert len(int(encoding, 16).to_bytes(32)) == 32
    more = (features[0], Feature("many", 7, multi_hot=True))
    named = (Feature("two", 5), features[1])
    single = (features[0], Feature("many", 6))
    assert len({encoding, *(dataset(features=changed).encoding for changed in (more, named, single))}) == 4


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows.*'labels': 4"):
        Rows(torch.zeros(5, 1), (Column(torch.arange(5)),), torch.zeros(4))


def test_a_missing_split_is_named():
    with pytest.raises(ValueError, match="'tiny' has no 'validation' rows"):
        dataset().rows("validation")
