"""Runs when Python starts in a process of `nalora launch`: attaches NA-LoRA to the Trainer that will be imported."""

import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
_others = [folder for folder in sys.path if folder != _HERE]
# A sitecustomize of the environment itself runs as it would without this one.
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from nalora.integrations import launched  # noqa: E402

launched.install()
