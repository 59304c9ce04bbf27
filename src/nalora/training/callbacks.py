"""What happens beside the steps: the progress bar, rows of metrics, a Ctrl-C that loses nothing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from nalora.distributed import processes
from nalora.files.atomic import json_text
from nalora.runs.folder import RunFolder, write_json

# In a checkpoint: the losses and the time up to it, which a Trainer begins anew when it is resumed.
_SO_FAR = "so_far.json"


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes metrics, and counts losses and time over all parts of a resumed run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.began = time.perf_counter()
        self.trainer: Any = None
        # The step from which on losses are added up: not 0 after a checkpoint that kept none.
        self.first_step = 0

    def follow(self, trainer: Any) -> None:
        """The time runs from here; what the trainer adds up is kept in its checkpoints."""
        self.trainer, self.began = trainer, time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the run has trained, in all its parts."""
        return time.perf_counter() - self.began

    @property
    def train_loss(self) -> float:
        """The mean loss of all steps, once training has ended."""
        trainer = self.trainer
        steps: int = trainer.state.global_step - self.first_step
        # The trainer has added what this process alone has summed since the last row.
        own = trainer._tr_loss.detach()
        of_all = float(processes.sum_over_processes(own.clone())) / processes.count()
        return (float(trainer._total_loss_scalar) - float(own) + of_all) / max(steps, 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on with the sums of the checkpoint that is resumed from."""
        file = self._checkpoint(state) / _SO_FAR
        if not file.is_file():
            self.first_step = state.global_step
            return
        so_far = json.loads(file.read_text(encoding="utf-8"))
        self.began -= so_far["seconds"]
        self.trainer._total_loss_scalar = so_far["loss_logged"]
        self.trainer._tr_loss += so_far["loss_since"]
        self.trainer._globalstep_last_logged = so_far["logged_step"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One row for each logged step."""
        if state.log_history:
            # It goes into the checkpoints, as JSON that transformers writes.
            state.log_history[-1] = json.loads(json_text(state.log_history[-1]))
        if state.is_world_process_zero and logs and "loss" in logs:
            row = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3)}
            with self.folder.metrics.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the sums in the checkpoint."""
        # Each process has added up its own; a row of metrics has their mean.
        since = processes.sum_over_processes(self.trainer._tr_loss.detach().clone()).item() / processes.count()
        if state.is_world_process_zero:
            so_far = {
                "loss_logged": self.trainer._total_loss_scalar,
                "loss_since": since,
                "logged_step": self.trainer._globalstep_last_logged,
                "seconds": self.seconds,
            }
            write_json(self._checkpoint(state) / _SO_FAR, so_far)

    def _checkpoint(self, state: Any) -> Path:
        return self.folder.checkpoints / f"checkpoint-{state.global_step}"


class GracefulStop(TrainerCallback):  # type: ignore[misc]
    """Ctrl-C or SIGTERM ends the run after the step it is in, with a checkpoint; a second Ctrl-C at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Listen."""
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        # A service manager sends SIGTERM to every process, and a study then to its workers: that is no second thought.
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save and stop, if any process was asked to: a signal reaches them at different steps."""
        self.asked = processes.any_process(self.asked, args.device)
        if self.asked:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the signals back."""
        self.stop_listening()

    def keep_listening(self) -> None:
        """To the end of the process: a launcher that lost one ends the others by SIGTERM, and they have to say so."""
        self._before = {}

    def stop_listening(self) -> None:
        """Also after an error, which no callback hears of."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Steps, loss, and for NA-LoRA what the gates do."""

    def __init__(self, console: Console, title: str) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[live]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.title = title

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar, at the step that a resumed run starts from."""
        if state.is_world_process_zero:
            self.task = self.progress.add_task(
                self.title, total=state.max_steps, completed=state.global_step, live="loss –"
            )
            self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One step further."""
        if state.is_world_process_zero:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """The latest loss, the regime shares and, where steps are scaled, the step scales."""
        if state.is_world_process_zero and logs and "loss" in logs:
            live = f"loss {float(logs['loss']):.3f}"
            gates = {name.removeprefix("nalora/"): value for name, value in logs.items() if name.startswith("nalora/")}
            if gates:
                shares = "/".join(f"{gates[name]:.2f}" for name in ("p_sup", "p_res", "p_pos"))
                live += f" · sup/res/pos {shares}"
                if gates["scaling_acts"]:
                    live += " · scales " + "/".join(f"{gates[f'scale_{name}']:.2f}" for name in ("gate", "up", "down"))
            self.progress.update(self.task, live=live)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the finished bar on the screen."""
        self.close()

    def close(self) -> None:
        """Also after an error, which no callback hears of."""
        self.progress.stop()
