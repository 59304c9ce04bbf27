"""Runs when Python starts in a process of `nalora launch`, around the environment's own sitecustomize if it has one.

Python imports one module of this name, the first in its path. This one leaves the path again, so that the program's own
is imported as without it. It must not fail: Python processes that have nothing to do with the training start here too,
also of environments without nalora.
"""

import importlib
import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_own() -> None:
    this = sys.modules.pop("sitecustomize")
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


def _install() -> None:
    try:
        from nalora.integrations import launched

        launched.install()
    except Exception as error:
        event = {"event": "not installed", "detail": f"{sys.executable}: {type(error).__name__}: {error}"}
        with open(json.loads(os.environ["NALORA_LAUNCH"])["report"], "a") as report:
            report.write(json.dumps(event) + "\n")


try:
    _run_own()
finally:
    if "NALORA_LAUNCH" in os.environ:
        _install()
