import pytest

pytest.importorskip("pyarrow")

from tritonemb.data import LogOptions, Schema, load_adult, open_dataset

TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, ?, 83311, Bachelors, 13, Divorced, Exec-managerial, Husband, White, Male, 0, 0, 13, Cuba, >50K
61, Private, 83311, HS-grad, 9, Divorced, Sales, Husband, White, Female, 0, 0, 13, Cuba, <=50K

"""
TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40, Cuba, >50K.
"""


def folder(tmp_path, train: str = TRAIN, test: str = TEST):
    (tmp_path / "adult.data").write_text(train)
    (tmp_path / "adult.test").write_text(test)
    return tmp_path


def test_columns_labels_and_vocabulary(tmp_path):
    data = load_adult(folder(tmp_path))
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.test.labels.tolist() == [1]
    ids = {f.name: (a.values.tolist(), b.values.tolist()) for f, a, b in
           zip(data.features, data.train.columns, data.test.columns, strict=True)}  # fmt: skip
    assert ids["workclass"] == ([2, 0, 1], [1])  # "?" is missing; one row each, so by name
    assert ids["education"] == ([1, 1, 2], [0])  # 11th is not among the training rows
    assert ids["sex"] == ([1, 1, 2], [1])


def test_numbers_are_standardised_by_training_rows(tmp_path):
    data = load_adult(folder(tmp_path))
    assert data.train.dense.mean(0).tolist() == pytest.approx([0.0] * 6, abs=1e-6)
    assert data.train.dense[:, 0].tolist() == pytest.approx([x / (242 / 3) ** 0.5 for x in (-11, 0, 11)], abs=1e-5)
    assert data.test.dense[0, 0].item() == pytest.approx((25 - 50) / (242 / 3) ** 0.5, abs=1e-5)
    assert data.train.dense[:, 4].tolist() == [0, 0, 0]  # capital_loss is constant, and stays finite


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("61,", "old,", r"adult.data, line 3: field 1 \(age\) is 'old', expected a number"),
        (">50K", "rich", r"adult.data, line 2: field 15 \(label\) is 'rich'"),
        ("HS-grad, ", "", "adult.data, line 3: expected 15 comma-separated fields, found 14"),
    ],
)
def test_a_bad_line_is_named(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message):
        load_adult(folder(tmp_path, train=TRAIN.replace(old, new)))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adult\.data"):
        load_adult(tmp_path)


def test_marital_status_may_be_a_second_label(tmp_path):
    data = load_adult(folder(tmp_path), ("income", "marital_status"))
    assert data.labels == ("income", "marital_status")
    assert data.train.labels.tolist() == [[0, 1], [1, 0], [0, 0]]
    assert "marital_status" not in [feature.name for feature in data.features]
    schema = Schema(labels=("income", "marital_status"))
    opened = open_dataset("adult", tmp_path, log=LogOptions(schema=schema))
    assert opened.encoding == data.encoding != load_adult(tmp_path).encoding
    one = LogOptions(schema=Schema(labels=("marital_status",)))
    assert open_dataset("adult", tmp_path, log=one).train.labels.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="adult has no label 'age'; its labels are income, marital_status"):
        load_adult(tmp_path, ("age",))
    (tmp_path / "log.csv").write_text("income,marital_status\n1,0\n")
    with pytest.raises(ValueError, match="no sparse columns are named"):
        open_dataset(str(tmp_path / "log.csv"), log=LogOptions(schema=schema))
