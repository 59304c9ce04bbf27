"""Rows of tokens that take little memory: flat arrays, or tokenised when they are needed.

A million rows of 250 tokens would take about 15 GB as Python lists. In flat arrays a token takes eight bytes; data sets
of more than `MOST_STORED` tokens are tokenised again whenever a row is needed, about 1 ms each.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

Row = dict[str, list[int]]
MOST_STORED = 40_000_000


class StoredRows(Sequence[Row]):
    """Rows in flat arrays of 32-bit integers, one array for each name."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.values: dict[str, array[int]] = {}
        self.ends: dict[str, array[int]] = {}
        for row in rows:
            self.append(row)

    @property
    def tokens(self) -> int:
        """The number of values over all names."""
        return sum(map(len, self.values.values()))

    @property
    def lengths(self) -> list[int]:
        """The number of input tokens of each row."""
        return [end - start for start, end in itertools.pairwise(self.ends["input_ids"])]

    def append(self, row: Row) -> None:
        """Add a row."""
        for name, ids in row.items():
            values = self.values.setdefault(name, array("i"))
            values.extend(ids)
            self.ends.setdefault(name, array("Q", [0])).append(len(values))

    def __len__(self) -> int:
        return len(next(iter(self.ends.values()), [0])) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return {
            name: values[self.ends[name][place] : self.ends[name][place + 1]].tolist()
            for name, values in self.values.items()
        }


class DerivedRows(Sequence[Row]):
    """Rows that a function returns for their number, each time they are needed; their lengths are known."""

    def __init__(self, lengths: Sequence[int], read: Callable[[int], Row]) -> None:
        self.lengths, self._count, self._read = lengths, len(lengths), read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        places: Any = range(self._count)[index]
        return self._read(places) if isinstance(places, int) else [self._read(place) for place in places]


def packed_rows(
    rows: Sequence[Row], lengths: Sequence[int], most: int, join: Callable[[list[Row]], Row]
) -> Sequence[Row]:
    """Return rows joined in order, as many as fit into `most` tokens."""
    starts, totals = array("Q"), array("L")
    for place, length in enumerate(lengths):
        if not starts or totals[-1] + length > most:
            starts.append(place)
            totals.append(0)
        totals[-1] += length
    ends = [*itertools.islice(starts, 1, None), len(lengths)]
    return DerivedRows(totals, lambda index: join([rows[i] for i in range(starts[index], ends[index])]))
