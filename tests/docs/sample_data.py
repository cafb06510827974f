"""The files that the commands of the documentation find: small, random, and with something in them to learn."""

from __future__ import annotations

import gzip
import random
from datetime import datetime, timedelta
from pathlib import Path

NUM_ROWS = 1_200


def make(folder: Path) -> None:
    """train.txt, dirty.txt, days/ in Criteo's format; logs/ in Parquet, csv/; adult/ in that of UCI Adult."""
    chance = random.Random(0)
    lines = [_criteo_line(chance) for _ in range(NUM_ROWS)]
    (folder / "train.txt").write_text("".join(lines))
    bad = {2: "x" + lines[2][1:], 40: "1\t2\n", 77: lines[77].replace("\t", "\tz", 1)}
    (folder / "dirty.txt").write_text("".join(bad.get(number, line) for number, line in enumerate(lines)))
    (folder / "days").mkdir()
    for day in range(3):
        part = "".join(lines[day * NUM_ROWS // 3 : (day + 1) * NUM_ROWS // 3])
        (folder / "days" / f"day_{day}.gz").write_bytes(gzip.compress(part.encode(), mtime=0))
    _make_logs(folder / "logs", chance)
    make_adult(folder / "adult", chance)


def _criteo_line(chance: random.Random) -> str:
    categories = [chance.randrange(2 if place < 3 else 40) for place in range(26)]
    label = int(chance.random() < (0.1, 0.3, 0.5, 0.9)[categories[0] + categories[1] + categories[2]])
    integers = [str(chance.randrange(-1, 100)) if chance.random() < 0.8 else "" for _ in range(13)]
    hexadecimal = [f"{value * 2_654_435_761 % 2**32:08x}" if chance.random() < 0.95 else "" for value in categories]
    return "\t".join([str(label), *integers, *hexadecimal]) + "\n"


def _make_logs(folder: Path, chance: random.Random) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    folder.mkdir()
    folder.with_name("csv").mkdir()
    begin = datetime(2026, 1, 1)
    for part in range(2):
        users = [chance.randrange(40) for _ in range(NUM_ROWS // 2)]
        table = pa.table(
            {
                "clicked": pa.array([int(chance.random() < (0.2 if user % 2 else 0.7)) for user in users], pa.int8()),
                "price": [round(chance.lognormvariate(2, 1), 2) for _ in users],
                "age": [chance.choice([None, 20, 30, 40]) for _ in users],
                "user": users,
                "item": [f"item-{chance.randrange(50)}" for _ in users],
                "tags": [[f"tag-{chance.randrange(9)}" for _ in range(chance.randrange(4))] for _ in users],
                "time": [begin + timedelta(minutes=part * len(users) + row) for row in range(len(users))],
            }
        )
        parquet.write_table(table, folder / f"part-{part}.parquet")
        csv.write_csv(table.drop_columns(["tags"]), folder.with_name("csv") / f"part-{part}.csv")


def make_adult(folder: Path, chance: random.Random) -> None:
    folder.mkdir()
    for name, end, rows in (("adult.data", "", 400), ("adult.test", ".", 200)):
        lines = ["|1x3 Cross validator\n"] if end else []
        for _ in range(rows):
            married, age = chance.random() < 0.5, chance.randrange(17, 90)
            rich = chance.random() < (0.6 if married else 0.1)
            fields = [
                age, chance.choice(["Private", "State-gov", "?"]), chance.randrange(10_000, 500_000), "Bachelors", 13,
                "Married-civ-spouse" if married else "Never-married", chance.choice(["Sales", "Tech-support", "?"]),
                "Husband" if married else "Unmarried", "White", "Male", chance.choice([0, 2174]), 0, 40,
                "United-States", ">50K" if rich else "<=50K",
            ]  # fmt: skip
            lines.append(", ".join(map(str, fields)) + end + "\n")
        (folder / name).write_text("".join(lines))
