"""Several models over the same batch in lockstep: at each FFN block a visitor sees the gates of all of them.

Each model runs in a thread of its own, which stops at every gate and waits for its turn; one runs at a time. So there
is never more than one block's z (and u) for each model, nothing is kept between blocks, and only one model's passing
tensors exist at a time. What comes after the last gate is not computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nalora.control.hooks import inert_hook
from nalora.control.tokens import TokenMask, register_mask_hooks
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError


class Gates(NamedTuple):
    """One model's gates of one block, [..., channels] in the model's dtype; u where it was asked for and there."""

    z: Tensor
    u: Tensor | None


# Hears (which site, the gates of each model in their order, which tokens are real: None for all of them).
Visitor = Callable[[int, Sequence[Gates], Tensor | None], None]


class _Arrival(NamedTuple):
    site: int
    gates: Gates
    mask: Tensor | None


class _Stopped(BaseException):
    """Ends a forward pass whose rest nobody needs; no model's own `except Exception` holds it up."""


class Lockstep:
    """Models of one architecture that are run together, for the length of a `with` block.

    Args:
        models: plain or wrapped by PEFT; each one its own object, in evaluation mode while a batch runs.
        sites: where their gates are; found on the first one by default.
        with_up: whether the visitor also gets u.

    Raises:
        NALoRAError: no FFN blocks, or a model that lacks a layer of them.
    """

    def __init__(
        self, models: Sequence[nn.Module], sites: Sequence[GateSite] | None = None, *, with_up: bool = False
    ) -> None:
        self.models = list(models)
        self.sites = tuple(find_sites(models[0]) if sites is None else sites)
        self.with_up = with_up
        # Forward passes begun, over all models.
        self.forward_passes = 0
        self._calls: int | None = None
        self._current: list[_Pass] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Lockstep:
        try:
            for number, model in enumerate(self.models):
                self._watch(number, model)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def run(self, batch: Mapping[str, Any], visit: Visitor) -> None:
        """One forward pass of every model, stopped at each gate for the visitor.

        Raises:
            NALoRAError: the models do not pass the same gates in the same order.
            Exception: whatever a model or the visitor raised, with its own traceback; the others have ended then.
        """
        training = [model.training for model in self.models]
        self._current = [_Pass(model.eval(), batch) for model in self.models]
        self.forward_passes += len(self._current)
        try:
            calls = 0
            for each in self._current:
                each.start()
            while self._next_gate(visit):
                calls += 1
                if calls == self._calls:
                    break
            # The first batch, run to its end, tells how many gates a pass has: some models call a layer repeatedly.
            self._calls = calls
        finally:
            for each in self._current:
                each.cancel()
            self._current = []
            for model, was in zip(self.models, training, strict=True):
                model.train(was)

    def _next_gate(self, visit: Visitor) -> bool:
        """Let every model come to its next gate and show them to the visitor; False where the passes have ended."""
        arrivals = [each.advance() for each in self._current]
        here = [arrival for arrival in arrivals if arrival is not None]
        if not here:
            return False
        places = {(arrival.site, arrival.gates.z.shape) for arrival in here}
        if len(here) < len(arrivals) or len(places) > 1:
            raise NALoRAError(
                self.sites[here[0].site].name,
                found="models that reach different gates, or gates of different shapes",
                expected="models of one architecture, with the same tokens at every gate",
                fix="compare checkpoints of the same base model",
            )
        visit(here[0].site, [arrival.gates for arrival in here], here[0].mask)
        return True

    def _watch(self, number: int, model: nn.Module) -> None:
        base = base_of(model)
        modules = dict(base.named_modules())
        for site in self.sites:
            for layer in {site.gate, site.up} - {None}:
                if layer not in modules:
                    raise NALoRAError(
                        site.name,
                        found=f"a {type(base).__name__} without {layer}",
                        expected="models of one architecture",
                        fix="compare checkpoints of the same base model",
                    )
        # From the base: it is what PEFT's wrapper hands its arguments to.
        masks, handles = register_mask_hooks(base, [site.gate for site in self.sites])
        self._handles += handles
        for index, site in enumerate(self.sites):
            stop = _Stop(site, index, masks[site.gate], self.with_up, partial(self._arrive, number))
            layers = {"gate": site.gate, "up": site.up if self.with_up else None}
            for role in ("gate",) if site.up == site.gate else ("gate", "up"):
                if (layer := layers[role]) is not None:
                    hook = _Hook(stop, role)
                    self._handles.append(modules[layer].register_forward_hook(hook))

    def _arrive(self, number: int, arrival: _Arrival) -> None:
        if self._current:
            self._current[number].arrive(arrival)


class _Pass(threading.Thread):
    """One model's forward pass, which goes on when `advance` is called and stops at its next gate."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        super().__init__(daemon=True, name=f"nalora-{type(model).__name__}")
        self.model, self.batch = model, batch
        self._turn, self._news = threading.Semaphore(0), threading.Semaphore(0)
        self._arrival: _Arrival | None = None
        self._error: BaseException | None = None
        self._ended = self._cancelled = False

    def run(self) -> None:
        """The thread: wait for the first turn, then compute. Grad mode and CUDA's device belong to a thread."""
        self._turn.acquire()
        try:
            if not self._cancelled:
                device = next(self.model.parameters()).device
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                with torch.no_grad():
                    self.model(**self.batch)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._news.release()

    def arrive(self, arrival: _Arrival) -> None:
        """In the thread: hand the gates over and wait for the next turn."""
        self._arrival = arrival
        del arrival
        self._news.release()
        self._turn.acquire()
        if self._cancelled:
            raise _Stopped

    def advance(self) -> _Arrival | None:
        """From outside: let it run to its next gate, None where it ended; what it raised is raised here."""
        if not self._ended:
            self._turn.release()
            self._news.acquire()
        if self._error is not None:
            raise self._error
        arrival, self._arrival = self._arrival, None
        return arrival

    def cancel(self) -> None:
        """From outside: end it where it stands, and wait until it has."""
        self._cancelled = True
        self._arrival = None
        self._turn.release()
        if self.ident is not None:
            self.join()


class _Stop:
    """Puts the gates of one block of one model together and hands them over."""

    def __init__(
        self, site: GateSite, index: int, mask: TokenMask, with_up: bool, hand_over: Callable[[_Arrival], None]
    ) -> None:
        self.site, self.index, self.mask, self.hand_over = site, index, mask, hand_over
        self.with_up = with_up and site.up is not None
        self.waiting: Tensor | None = None

    def see(self, role: str, output: Tensor) -> None:
        """Take a layer's output; with both at hand where both are wanted, stop."""
        output = output.detach()
        if not self.with_up or self.site.up == self.site.gate:
            z = u = output
        elif self.waiting is None:
            # Only a reference, for the moment between two neighbouring layers.
            self.waiting = output
            return
        else:
            z, u = (output, self.waiting) if role == "gate" else (self.waiting, output)
            self.waiting = None
        z = z[..., self.site.gate_rows]
        u = u[..., self.site.up_rows]
        if self.site.up_offset:
            u = u + self.site.up_offset
        self.hand_over(_Arrival(self.index, Gates(z, u if self.with_up else None), self.mask.of(z.shape[:-1])))


class _Hook:
    """The forward hook on a layer. A copy of the model gets a dead one in its place."""

    def __init__(self, stop: _Stop, role: str) -> None:
        self.stop, self.role = stop, role

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.stop.see(self.role, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()
