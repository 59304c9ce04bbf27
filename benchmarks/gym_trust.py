"""Measure which families of reasoning-gym give marks to trivial answers, and write the table that `nalora tasks` shows.

PYTHONHASHSEED=0 python benchmarks/gym_trust.py              all families, ten minutes on two CPU cores
PYTHONHASHSEED=0 python benchmarks/gym_trust.py coin_flip    some, which are printed and not written
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.tasks import gym, gym_trust


def main() -> None:
    """Measure, print a line for each family, and write the table if all were measured."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise SystemExit("run with PYTHONHASHSEED=0: the questions of some families depend on it")
    measured: dict[str, Any] = {}
    for family in sys.argv[1:] or sorted(gym.families()):
        try:
            measured[family] = gym_trust.measure(family)
        except NALoRAError as error:  # composite has no questions of its own, codeio draws others each time
            print(f"{family}: left out, {error.found}", flush=True)
            continue
        fault = gym_trust.fault(measured[family])
        print(f"{family}: {fault.reason if fault else 'trusted'}", flush=True)
    rows = ",\n".join(f"  {json.dumps(family)}: {json.dumps(row)}" for family, row in measured.items())
    head = f'"reasoning_gym": {json.dumps(version("reasoning-gym"))},\n "items": {gym_trust.ITEMS}'
    table = f'{{{head},\n "families": {{\n{rows}\n }}\n}}\n'
    if sys.argv[1:]:
        print(table)
    else:
        atomic.write(gym_trust.FILE, table)


if __name__ == "__main__":
    main()
