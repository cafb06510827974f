"""The parts of pyarrow that read logs, each imported when it is first used."""

from typing import Any

from tritonemb.utils import LazyModule

pa: Any = LazyModule("pyarrow")
arrow_csv: Any = LazyModule("pyarrow.csv")
compute: Any = LazyModule("pyarrow.compute")
dataset: Any = LazyModule("pyarrow.dataset")
fs: Any = LazyModule("pyarrow.fs")
parquet: Any = LazyModule("pyarrow.parquet")
