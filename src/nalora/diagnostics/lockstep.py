"""Several models on the same batch in lockstep: at each FFN block a visitor gets the gates of all of them.

Each model runs in its own thread, which stops at every gate; one thread runs at a time. So at most one block's z (and
u) per model is in memory, and only one model's intermediate tensors. Layers after the last gate are not computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nalora.control.gate_taps import Tap
from nalora.control.tokens import TokenMask, register_mask_hooks
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError

_SAME_BASE = "compare checkpoints of the same base model"


class Gates(NamedTuple):
    """One model's gates of one block, [..., channels] in the model's dtype; u is None unless requested and present."""

    z: Tensor
    u: Tensor | None


# Called with (index of the site, gates of each model, mask of the real tokens or None if all are real).
Visitor = Callable[[int, Sequence[Gates], Tensor | None], None]


class _Arrival(NamedTuple):
    site: int
    gates: Gates
    mask: Tensor | None


class _Stopped(BaseException):
    """Ends a forward pass early; not an Exception, so that no model's own `except Exception` catches it."""


class Lockstep:
    """Models of one architecture that run together inside a `with` block.

    Args:
        models: different objects, plain or wrapped by PEFT; they are in evaluation mode while a batch runs.
        sites: where their gates are (default: found on the first model).
        with_up: whether the visitor also gets u.

    Raises NALoRAError if there are no FFN blocks or if a model lacks a layer of them.
    """

    def __init__(
        self, models: Sequence[nn.Module], sites: Sequence[GateSite] | None = None, *, with_up: bool = False
    ) -> None:
        self.models = list(models)
        self.sites = tuple(find_sites(models[0]) if sites is None else sites)
        self.with_up = with_up
        self.forward_passes = 0  # over all models
        self._gates_per_pass: int | None = None
        self._passes: list[_Pass] = []
        self._handles: list[Tap] = []

    def __enter__(self) -> Lockstep:
        try:
            for number, model in enumerate(self.models):
                self._register_hooks(number, model)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def run_all(
        self,
        batches: Iterable[Mapping[str, Any]],
        visit: Visitor,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Run the batches on the models' device; `progress` gets the number of finished batches."""
        for done, batch in enumerate(batches, 1):
            self.run(on_device(batch, self.models[0]), visit)
            progress(done)

    def run(self, batch: Mapping[str, Any], visit: Visitor) -> None:
        """Run one forward pass of every model, stopped at each gate for the visitor.

        Raises NALoRAError if the models do not reach the same gates in the same order, and whatever a model or the
        visitor raised, with its traceback, after all passes have ended.
        """
        training = [model.training for model in self.models]
        self._passes = [_Pass(model.eval(), batch) for model in self.models]
        self.forward_passes += len(self._passes)
        try:
            gates = 0
            for forward in self._passes:
                forward.start()
            while self._next_gate(visit):
                gates += 1
                if gates == self._gates_per_pass:
                    break
            # Counted in the first batch, which runs to its end: some models call a layer repeatedly.
            self._gates_per_pass = gates
        finally:
            for forward in self._passes:
                forward.cancel()
            self._passes = []
            for model, mode in zip(self.models, training, strict=True):
                model.train(mode)

    def _next_gate(self, visit: Visitor) -> bool:
        """Run every model to its next gate and call the visitor; return False if the passes have ended."""
        arrivals = [forward.advance() for forward in self._passes]
        here = [arrival for arrival in arrivals if arrival is not None]
        if not here:
            return False
        places = {(arrival.site, arrival.gates.z.shape) for arrival in here}
        if len(here) < len(arrivals) or len(places) > 1:
            raise NALoRAError(
                self.sites[here[0].site].name,
                found="models that reach different gates, or gates of different shapes",
                expected="models of one architecture, with the same tokens at every gate",
                fix=_SAME_BASE,
            )
        visit(here[0].site, [arrival.gates for arrival in here], here[0].mask)
        return True

    def _register_hooks(self, number: int, model: nn.Module) -> None:
        base = base_of(model)
        modules = dict(base.named_modules())
        for site in self.sites:
            for layer in {site.gate, site.up} - {None}:
                if layer not in modules:
                    raise NALoRAError(
                        site.name,
                        found=f"a {type(base).__name__} without {layer}",
                        expected="models of one architecture",
                        fix=_SAME_BASE,
                    )
        # Watched on the base, which PEFT's wrapper passes its arguments to.
        masks, handles = register_mask_hooks(base, [site.gate for site in self.sites])
        self._handles += handles
        for index, site in enumerate(self.sites):
            collector = _GateCollector(site, index, masks[site.gate], self.with_up, partial(self._arrive, number))
            layers = {site.gate: "gate"}
            if self.with_up and site.up is not None:
                layers.setdefault(site.up, "up")
            for layer, role in layers.items():
                self._handles.append(modules[layer].register_forward_hook(partial(collector.collect, role)))

    def _arrive(self, number: int, arrival: _Arrival) -> None:
        if self._passes:
            self._passes[number].arrive(arrival)


class _Pass(threading.Thread):
    """One model's forward pass, which continues to its next gate when `advance` is called."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        super().__init__(daemon=True, name=f"nalora-{type(model).__name__}")
        self.model, self.batch = model, batch
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._arrival: _Arrival | None = None
        self._error: BaseException | None = None
        self._ended = self._cancelled = False

    def run(self) -> None:
        """Compute the forward pass in the thread; grad mode and CUDA device are set per thread."""
        self._may_run.acquire()
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
            self._has_stopped.release()

    def arrive(self, arrival: _Arrival) -> None:
        """Hand the gates over and wait until the pass may continue. Called in the thread."""
        self._arrival = arrival
        del arrival
        self._has_stopped.release()
        self._may_run.acquire()
        if self._cancelled:
            raise _Stopped

    def advance(self) -> _Arrival | None:
        """Run the pass to its next gate and return it, or None at the end; raise what the model raised."""
        if not self._ended:
            self._may_run.release()
            self._has_stopped.acquire()
        if self._error is not None:
            raise self._error
        arrival, self._arrival = self._arrival, None
        return arrival

    def cancel(self) -> None:
        """End the pass and wait until it has ended."""
        self._cancelled = True
        self._arrival = None
        self._may_run.release()
        if self.ident is not None:
            self.join()


class _GateCollector:
    """Combines the outputs of one block's gate and up layers in one model and hands them over."""

    def __init__(
        self, site: GateSite, index: int, mask: TokenMask, with_up: bool, hand_over: Callable[[_Arrival], None]
    ) -> None:
        self.site, self.index, self.mask, self.hand_over = site, index, mask, hand_over
        self.with_up = with_up and site.up is not None
        self.waiting: Tensor | None = None

    def collect(self, role: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Take a layer's output as a forward hook; hand z and u over when both are there."""
        output = output.detach()
        if not self.with_up or self.site.up == self.site.gate:
            z = u = output
        elif self.waiting is None:
            # Only a reference, between two neighbouring layers.
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


def on_device(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the batch on the model's device, with the cache of keys and values switched off."""
    device = next(model.parameters()).device
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if getattr(getattr(model, "config", None), "use_cache", None) is not None:
        moved["use_cache"] = False
    return moved
