from __future__ import annotations

import pytest

from nalora.errors import NALoRAError
from nalora.tasks import sandbox

# Tests that run programs; the others of these files hold on any system.
_ANYWHERE = ("test_check_says_what_is_missing", "test_unsafe_runs_anywhere_with_limits", "test_limits_are_positive")
_CODE = (
    "test_all_reference_solutions_of_humaneval_pass",
    "test_no_broken_solution_of_humaneval_passes",
    "test_humaneval_from_a_folder",
    "test_mbpp_scores",
)


@pytest.fixture(autouse=True)
def _only_where_programs_can_be_isolated(request):
    """A system that isolates nothing is refused by the sandbox, and so has nothing to test in it."""
    name, file = request.function.__name__, request.path.name
    if (file.startswith("test_sandbox") and name not in _ANYWHERE) or (file == "test_code.py" and name in _CODE):
        try:
            sandbox.check()
        except NALoRAError as error:
            pytest.skip(str(error))
