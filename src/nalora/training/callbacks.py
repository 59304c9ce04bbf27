"""Trainer callbacks of every run: metrics, the progress bar, and Ctrl-C, which stops after a checkpoint."""

from __future__ import annotations

import json
import signal
import time
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from nalora.distributed import processes
from nalora.files.atomic import json_text
from nalora.runs.folder import RunFolder, write_json
from nalora.runs.progress import LiveText, progress_bars

# In a checkpoint: the loss sums and the time so far, which a resumed Trainer would restart at 0.
_TOTALS = "so_far.json"


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes metrics, and adds up losses and time over all parts of a resumed run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.began = time.perf_counter()
        self.trainer: Any = None
        # The step from which losses are added up: not 0 after a checkpoint without totals.
        self.first_step = 0

    def start(self, trainer: Any) -> None:
        """Start the clock for this trainer, whose loss sums are kept in its checkpoints."""
        self.trainer, self.began = trainer, time.perf_counter()

    @property
    def seconds(self) -> float:
        """The training time of all parts of the run."""
        return time.perf_counter() - self.began

    @property
    def train_loss(self) -> float:
        """The mean loss of all steps, once training has ended."""
        trainer = self.trainer
        steps: int = trainer.state.global_step - self.first_step
        # The trainer has added only this process's sum since the last row.
        own = trainer._tr_loss.detach()
        mean = float(processes.sum_over_processes(own.clone())) / processes.count()
        return (float(trainer._total_loss_scalar) - float(own) + mean) / max(steps, 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue with the totals of the checkpoint that is resumed."""
        file = self.folder.checkpoint(state.global_step) / _TOTALS
        if not file.is_file():
            self.first_step = state.global_step
            return
        totals = json.loads(file.read_text(encoding="utf-8"))
        self.began -= totals["seconds"]
        self.trainer._total_loss_scalar = totals["loss_logged"]
        self.trainer._tr_loss += totals["loss_since"]
        self.trainer._globalstep_last_logged = totals["logged_step"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a row for each logged step."""
        if state.log_history:
            # transformers writes it into the checkpoints as JSON.
            state.log_history[-1] = json.loads(json_text(state.log_history[-1]))
        if state.is_world_process_zero and logs and "loss" in logs:
            row = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3)}
            with self.folder.metrics.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the totals into the checkpoint."""
        # Each process has its own sum; a row of metrics has their mean.
        since = processes.sum_over_processes(self.trainer._tr_loss.detach().clone()).item() / processes.count()
        if state.is_world_process_zero:
            totals = {
                "loss_logged": self.trainer._total_loss_scalar,
                "loss_since": since,
                "logged_step": self.trainer._globalstep_last_logged,
                "seconds": self.seconds,
            }
            write_json(self.folder.checkpoint(state.global_step) / _TOTALS, totals)


class GracefulStop(TrainerCallback):  # type: ignore[misc]
    """Ends the run with a checkpoint after the current step on Ctrl-C or SIGTERM; at once on a second Ctrl-C."""

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Install the signal handlers."""
        self._handlers = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A service manager sends SIGTERM to every process, and then a study to its workers: one request, not two.
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save and stop if any process got a signal: it reaches them at different steps."""
        self.requested = processes.any_process(self.requested, args.device)
        if self.requested:
            control.should_save = control.should_training_stop = True
        return control

    def keep_handlers(self) -> None:
        """Keep handling signals: a launcher that lost a process ends the others by SIGTERM, and they have to report."""
        self._handlers = {}

    def restore_handlers(self) -> None:
        """Restore the signal handlers, after training or an error."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """Ends the run after a step, in the middle of its schedule; it saves there if it saves every N steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Stop as the Trainer does after its last step."""
        if state.global_step >= self.step:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == "steps"
        return control


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Shows steps, loss and, for NA-LoRA, regime shares and step scales."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.progress = progress_bars(console, LiveText("{task.fields[live]}"))
        self.title, self.steps = title, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar, at the step that a resumed run starts from."""
        if state.is_world_process_zero:
            self.task = self.progress.add_task(self.title, total=self.steps, completed=state.global_step, live="loss –")
            self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Advance the bar."""
        if state.is_world_process_zero:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show the latest loss, the regime shares and, if steps are scaled, the step scales."""
        if state.is_world_process_zero and logs and "loss" in logs:
            live = f"loss {float(logs['loss']):.3f}"
            gates = {name.removeprefix("nalora/"): value for name, value in logs.items() if name.startswith("nalora/")}
            if gates:
                shares = "/".join(f"{gates[name]:.2f}" for name in ("p_sup", "p_res", "p_pos"))
                live += f" · sup/res/pos {shares}"
                if gates["scaling_acts"]:
                    live += " · scales " + "/".join(f"{gates[f'scale_{name}']:.2f}" for name in ("gate", "up", "down"))
            self.progress.update(self.task, live=live)
