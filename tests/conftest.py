from __future__ import annotations

import gc
import logging
import os
import warnings

import hypothesis
import pytest
import torch

# No test needs the hub; without this a missing model is asked for again and again for a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# pytest's workers and some shells set it, and the commands would fold their tables to that width.
os.environ.pop("COLUMNS", None)
if not torch.cuda.is_available():
    # Triton's kernels run on the CPU through its interpreter; it must be asked for before they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says nothing on a machine that does other work.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="module", autouse=True)
def _modules_are_no_garbage():
    """A training ends with a search for garbage among all objects, and most of them are the imported libraries."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_seed_everywhere():
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="nalora: Adam")


@pytest.fixture(autouse=True)
def _messages_are_logged():
    """A command that runs in the process of a test switches the messages of libraries off for the tests after it."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def ffns_layer_by_layer(monkeypatch):
    """Compute FFNs on the CPU as users do: Triton's interpreter, which is there for tests, cannot multiply bf16."""
    from nalora.control import fused_ffn

    monkeypatch.setattr(fused_ffn, "triton_runs_on", lambda device: device.type == "cuda")
