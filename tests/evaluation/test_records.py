"""A row that was added is there after any kill, and a half-written one harms nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nalora.evaluation.folder import Records

ROWS = [{"id": str(n), "text": "zwölf\n\u2028\x85" * n} for n in range(5)]


@given(lost=st.integers(0, 200))
def test_any_cut_leaves_whole_rows_and_a_file_to_append_to(tmp_path_factory, lost):
    path = tmp_path_factory.mktemp("records") / "rows.jsonl"
    Records(path).add(ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - lost)])
    kept = Records(path)
    assert list(kept.rows.values()) == ROWS[: len(kept.rows)]
    kept.add([row for row in ROWS if row["id"] not in kept])
    assert list(Records(path).rows.values()) == ROWS
