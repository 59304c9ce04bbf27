"""The parts of a page that are generated: the text between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLACE = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- /(?P=name) -->)", re.DOTALL)


def fill(page: str, lines: Mapping[str, Sequence[str]]) -> str:
    """Return the page with the lines of each name in their place."""
    return _PLACE.sub(lambda match: match[1] + "\n".join(lines[match["name"]]) + "\n" + match[3], page)
