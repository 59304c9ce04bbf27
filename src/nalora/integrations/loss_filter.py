"""Trainer's filter of losses that are not finite (`logging_nan_inf_filter`), computed on the device.

Trainer reads the loss of every pass in Python. Until then the host launches nothing, so that clipping and the optimizer
of a replayed pass begin late, and the device waits for Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossFilter:
    """Does what Trainer does with losses that are not finite: they count as the mean since the last log.

    Args:
        trainer: whose own filter is off between `apply` and `release`, which is when Trainer would use it.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._is_off = False
        self._logged = -1
        self._sum: Tensor | None = None

    @torch.no_grad()
    def apply(self, loss: Tensor) -> Tensor:
        """Return the loss that Trainer adds to its sum, if its filter is on."""
        args = self.trainer.args
        if not (args.logging_nan_inf_filter or self._is_off):
            return loss
        args.logging_nan_inf_filter, self._is_off = False, True
        logged = self.trainer._globalstep_last_logged
        if self._sum is None or logged != self._logged:
            self._sum, self._logged = torch.zeros_like(loss), logged
        mean = self._sum / (1 + self.trainer.state.global_step - logged)
        loss = torch.where(torch.isfinite(loss), loss, mean)
        self._sum += loss
        return loss

    def release(self) -> None:
        """Switch Trainer's own filter on again, for evaluation and whatever else reads the setting."""
        if self._is_off:
            self.trainer.args.logging_nan_inf_filter, self._is_off = True, False

    def restart(self) -> None:
        """Forget the losses of an earlier training."""
        self.release()
        self._sum = None
