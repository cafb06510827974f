"""The pieces that schemas of several ops share. Ops take a layout as their last arguments, so `*layout` catches it."""

from tritonemb.kernels.layout import Layout

LAYOUT = (
    "Tensor tables, Tensor lookups, Tensor key_starts, str table_names, str feature_names, SymInt multiplicity, "
    "SymInt num_rows, SymInt width, bool pooled"
)
GROUPS = "Tensor rows, Tensor starts, Tensor order, Tensor num_groups"
BATCH = "Tensor values, Tensor offsets, Tensor? sample_weights"

assert [part.split()[-1] for part in LAYOUT.split(", ")] == list(Layout._fields)
