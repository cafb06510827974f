"""UCI Adult (Becker & Kohavi, 1996): does a person earn more than 50,000 dollars a year? `adult.data`, `adult.test`.

Eight categorical features; six numbers, the two capital ones as `log(1 + x)`, all standardised by the training rows'
mean and deviation.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch

from tritonemb.data.columns import Column, Rows
from tritonemb.data.encode import encode_categories
from tritonemb.data.in_memory import Dataset
from tritonemb.data.protocol import Feature
from tritonemb.utils import require

FIELDS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "label",
)  # fmt: skip
NUMBERS = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
CATEGORIES = tuple(field for field in FIELDS[:-1] if field not in NUMBERS)
SKEWED = ("capital_gain", "capital_loss")
LABELS = {"<=50K": 0.0, ">50K": 1.0}


def load_adult(folder: str | Path) -> Dataset:
    """Read `adult.data` (training rows) and `adult.test` from a folder.

    Raises:
        FileNotFoundError, ValueError: a bad line is reported by file, line, field and value.
    """
    pa = require("pyarrow")
    files = [Path(folder) / name for name in ("adult.data", "adult.test")]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected UCI's adult.data and adult.test in one folder")
    train, test = (_read(path) for path in files)
    num_train, fields = len(train), dict(zip(FIELDS, zip(*train, *test, strict=True), strict=True))
    labels = np.array([LABELS[label] for label in fields["label"]], dtype=np.float32)
    dense = np.stack([_standardised(name, fields[name], num_train) for name in NUMBERS], axis=1)
    features, columns = [], []
    for name in CATEGORIES:
        ids, num_embeddings = encode_categories(pa.array([None if v == "?" else v for v in fields[name]]), num_train)
        features.append(Feature(name, num_embeddings))
        columns.append(Column(ids))
    rows = Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))
    return Dataset("adult", tuple(features), rows.slice(0, num_train), rows.slice(num_train, len(rows)))


def _read(path: Path) -> list[list[str]]:
    rows = []
    with path.open(newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        for fields in reader:
            if not fields or fields[0].startswith("|"):  # UCI's adult.test begins with a remark
                continue
            fields[-1] = fields[-1].rstrip(".")
            _check(f"{path}, line {reader.line_num}", fields)
            rows.append(fields)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _check(where: str, fields: list[str]) -> None:
    if len(fields) != len(FIELDS):
        raise ValueError(f"{where}: expected {len(FIELDS)} comma-separated fields, found {len(fields)}")
    for place, (name, value) in enumerate(zip(FIELDS, fields, strict=True), start=1):
        if name in NUMBERS and not value.isdecimal():
            raise ValueError(f"{where}: field {place} ({name}) is {value!r}, expected a number")
        if name == "label" and value not in LABELS:
            raise ValueError(f"{where}: field {place} ({name}) is {value!r}, expected one of {list(LABELS)}")


def _standardised(name: str, texts: tuple[str, ...], num_train: int) -> np.ndarray:
    values = np.array(texts, dtype=np.float64)
    if name in SKEWED:
        values = np.log1p(values)
    deviation = values[:num_train].std()
    return ((values - values[:num_train].mean()) / (deviation if deviation > 0 else 1.0)).astype(np.float32)
