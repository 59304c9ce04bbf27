from __future__ import annotations

import functools

import pytest
from judge_servers import server, transformers_server  # noqa: F401 - fixtures

from nalora.errors import NALoRAError
from nalora.tasks import sandbox

# Tests that run programs; the others of these files hold on any system.
_ANYWHERE = (
    "test_check_reports_what_is_missing",
    "test_unsafe_runs_anywhere_with_limits",
    "test_limits_are_positive",
    "test_packages_are_visible_with_their_requirements_and_no_others",
)
_CODE = (
    "test_all_reference_solutions_of_humaneval_pass",
    "test_no_broken_solution_of_humaneval_passes",
    "test_humaneval_from_a_folder",
    "test_mbpp_scores",
)


@functools.cache
def missing(backend: str) -> str | None:
    """Why this system does not have an isolation backend; None where it has it, also with a hole."""
    try:
        sandbox._launch(backend, "", "", (), "", sandbox.Limits())
    except NALoRAError as error:
        return error.found
    return None


@pytest.fixture
def backends() -> list[str]:
    """The isolation backends that this system has."""
    return [backend for backend in sandbox._backends() if missing(backend) is None]


@pytest.fixture(autouse=True)
def _only_where_programs_can_be_isolated(request):
    """The sandbox refuses a system that cannot isolate programs, so these tests are skipped there."""
    name, file = request.function.__name__, request.path.name
    if (file.startswith("test_sandbox") and name not in _ANYWHERE) or (file == "test_code.py" and name in _CODE):
        try:
            sandbox.check()
        except NALoRAError as error:
            pytest.skip(str(error))
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend is not None and missing(backend) is not None:
        pytest.skip(f"{backend}: {missing(backend)}")
