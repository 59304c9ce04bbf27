"""A run that the user stops with Ctrl-C, to be resumed."""

from __future__ import annotations

import os
import signal

import pytest
import transformers

import nalora.training.run as module


def train_and_stop(run, monkeypatch, after: int, *, resume: bool = False) -> None:
    """Train until Ctrl-C arrives in the step of that number, which is still finished."""

    class CtrlC(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == after - 1:
                os.kill(os.getpid(), signal.SIGINT)

    make = module.make_trainer
    with monkeypatch.context() as patched:
        patched.setattr(module, "make_trainer", lambda *a: (t := make(*a)).add_callback(CtrlC()) or t)
        with pytest.raises(module.Interrupted, match=f"after step {after}"):
            module.train(run, resume=resume)
