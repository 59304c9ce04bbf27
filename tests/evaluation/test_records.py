"""Added rows survive a kill, and an incomplete last row is removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nalora.evaluation.folder import Records

ROWS = [{"id": str(n), "text": "zwölf\n\u2028\x85" * n} for n in range(5)]


@given(lost=st.integers(0, 200))
def test_a_truncated_file_keeps_complete_rows_and_can_be_appended_to(tmp_path_factory, lost):
    path = tmp_path_factory.mktemp("records") / "rows.jsonl"
    Records(path).add(ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - lost)])
    kept = Records(path)
    assert list(kept.rows.values()) == ROWS[: len(kept.rows)]
    kept.add([row for row in ROWS if row["id"] not in kept])
    assert list(Records(path).rows.values()) == ROWS
