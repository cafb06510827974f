"""Lease of a server's rows, with their optimizer states, to a trainer that applies the optimizer itself."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tritonemb.layout import NO_KEY, nonzero
from tritonemb.server.partitions import NO_ROWS, Partitions
from tritonemb.storage.store import cpu_kernels, record_of
from tritonemb.tables.dynamic_table import concat_ids, find_all, insert_batch
from tritonemb.utils import join_names


class Lease:
    """Access to rows by their records: weight and optimizer states; `keys` are ids of a static table, row numbers of a
    dynamic one.
    """

    def __init__(self, partitions: Partitions) -> None:
        self._partitions, self.is_active = partitions, False  # whether a trainer has rows that it has not written back
        tables, states, by_number = partitions.spec.tables, partitions.optimizer.states, partitions.by_number
        self.dynamic_numbers = [number for number in by_number if tables[number].num_embeddings is None]
        self._records = {
            number: record_of(table.config.embedding_dim, table.config.dtype, states, number in self.dynamic_numbers)
            for number, table in by_number.items()
        }

    @torch.no_grad()
    def allocate(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], insert: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return rows of a batch's distinct ids in dynamic tables, -1 for refused ids, and masks of newly inserted ids.

        ValueError if a table is full; then the tables are unchanged.
        """
        partitions, sizes = self._partitions, [*map(len, ids)]
        tables = [partitions.by_number[number] for number in self.dynamic_numbers]
        if not insert or not tables:
            return find_all(tables, ids), [torch.zeros_like(table_ids, dtype=torch.bool) for table_ids in ids]
        rows, keys, _ = insert_batch(tables, *concat_ids(ids), torch.cat(list(occurrences)))
        by_number = dict(zip(self.dynamic_numbers, rows.split(sizes), strict=True))
        partitions.changes.mark(by_number)
        partitions.changes.note_removed()
        if (pinned := partitions.pin([by_number.get(number, NO_ROWS) for number in partitions.numbers])) is not None:
            pinned.release()
        return [*by_number.values()], [*((keys != NO_KEY) & (rows >= 0)).split(sizes)]

    def check(self, keys: Sequence[tuple[int, Tensor]], records: Sequence[Tensor]) -> None:
        """Check keys by table number, and the records of the first of them; ValueError."""
        by_number, dynamic = self._partitions.by_number, self.dynamic_numbers
        exist = self._partitions.owns(pair for pair in keys if pair[0] not in dynamic)
        for number, rows in keys:
            exist &= number not in dynamic or not ((rows < 0) | (rows >= len(by_number[number].index.ids))).any()
            exist &= not (rows[1:] <= rows[:-1]).any()
        if not exist:
            names = join_names(by_number[number].config.name for number, _ in keys)
            raise ValueError(f"tables {names} do not have these rows on this server")
        shapes = [(torch.uint8, len(table_keys), self._records[number].num_bytes) for number, table_keys in keys]
        if [(tensor.dtype, *tensor.shape) for tensor in records] != shapes[: len(records)]:
            raise ValueError(f"records must be {shapes}")

    @torch.no_grad()
    def read(self, keys: Mapping[int, Tensor]) -> list[Tensor]:
        rows, move, result = self._rows(keys), cpu_kernels("row_cache").move_rows_, list[Tensor]()
        positions = {number: nonzero(table_rows >= 0) for number, table_rows in rows.items()}
        known_rows = {number: table_rows[positions[number]] for number, table_rows in rows.items()}
        with self._partitions.memory(known_rows) as memories:
            for number, (memory, slots) in memories.items():
                table, record, table_rows = self._partitions.by_number[number], self._records[number], rows[number]
                records = torch.zeros(table_rows.numel(), record.num_bytes, dtype=torch.uint8)
                fields = record.views(records)
                names = [name for name in fields if name in memory]
                move([fields[name] for name in names], [memory[name] for name in names], positions[number], slots)
                if slots.numel() < table_rows.numel():
                    missing_mask = table_rows < 0
                    fields["weight"][missing_mask] = table.initial_values(keys[number][missing_mask])
                if "id" in fields:
                    fields["id"].copy_(table.index.ids[table_rows])
                result.append(records)
        return result

    @torch.no_grad()
    def write(self, keys: Mapping[int, Tensor], records: Sequence[Tensor]) -> None:
        """Write records by table number; the first write of a static row inserts it."""
        rows, move, by_number = self._rows(keys), cpu_kernels("row_cache").move_rows_, self._partitions.by_number
        missing = {n: positions for n, table_rows in rows.items() if (positions := nonzero(table_rows < 0)).numel()}
        if missing:
            tables, ids = [by_number[n] for n in missing], concat_ids([keys[n][i] for n, i in missing.items()])
            new_rows = insert_batch(tables, *ids, rules=[table.rule(table.clock) for table in tables])[0]
            for number, table_rows in zip(missing, new_rows.split([*map(len, missing.values())]), strict=True):
                rows[number][missing[number]] = table_rows
        self._partitions.changes.mark(rows)
        with self._partitions.memory(rows, dirty=True) as memories:
            for (number, (memory, slots)), table_records in zip(memories.items(), records, strict=True):
                fields = self._records[number].views(table_records)
                if "id" in memory:
                    fields["id"] = by_number[number].index.ids[rows[number]]
                move([*memory.values()], [fields[name] for name in memory], slots, torch.arange(slots.numel()))

    def _rows(self, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return row numbers by table number, in the order of keys; -1 for static rows never written."""
        by_number, static = self._partitions.by_number, [n for n in keys if n not in self.dynamic_numbers]
        static_rows = find_all([by_number[number] for number in static], [keys[number] for number in static])
        return {**keys, **dict(zip(static, static_rows, strict=True))}
