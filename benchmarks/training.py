"""One model, its optimizer and a batch; variants of the training step attach to it and detach again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from paper_hooks import PaperHooks

import nalora
from nalora.kernels.cuda_graphs import GraphedStep


class Training:
    def __init__(self, model: torch.nn.Module, batch: int, length: int, lr: float = 1e-5) -> None:
        self.model = self.forward = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        on_gpu = self.device.type == "cuda"
        # CUDA graphs need a tensor and capturable; the fused kernel is the same without them.
        rate = torch.tensor(lr, device=self.device) if on_gpu else lr
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=on_gpu, capturable=on_gpu)
        vocabulary = model.config.vocab_size
        self.batch = {"input_ids": torch.randint(0, vocabulary, (batch, length), device=self.device)}
        self.controller: nalora.NALoRAController | None = None
        self.losses: list[torch.Tensor] = []

    def loss_of(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # The CPU is there to compare gradients, in float32.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.forward(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def train_on(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.loss_of(batch)
        loss.backward()
        self.clip()
        self.update()
        return loss.detach()

    def clip(self) -> None:
        if self.controller is not None:
            self.controller.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.losses.append(self.train_on(self.batch))

    def kept_bytes(self) -> int:
        """Return the bytes of model and optimizer, which exist while other trainings run."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    @contextlib.contextmanager
    def plain(self) -> Iterator[Callable[[], None]]:
        yield self.step

    @contextlib.contextmanager
    def paper(self) -> Iterator[Callable[[], None]]:
        hooks = PaperHooks(self.model)
        try:
            yield self.step
        finally:
            hooks.remove()

    def ours(self, **options):
        @contextlib.contextmanager
        def attached() -> Iterator[Callable[[], None]]:
            self.controller = nalora.attach(self.model, self.optimizer, **options)
            try:
                yield self.step
            finally:
                self.controller.detach()
                self.controller = None

        return attached

    def within(self, patch: Callable[[], AbstractContextManager[None]], variant=None):
        """Return the variant (default: plain) inside a patch of the model, which is undone with it."""

        @contextlib.contextmanager
        def patched() -> Iterator[Callable[[], None]]:
            with patch(), (variant or self.plain)() as step:
                yield step

        return patched

    def graphed(self, variant, compiled: bool = False):
        """Return the variant's step replayed from a CUDA graph, of the compiled model if `compiled`."""

        @contextlib.contextmanager
        def captured() -> Iterator[Callable[[], None]]:
            with variant():
                self.forward = torch.compile(self.model) if compiled else self.model
                replay = GraphedStep(self.train_on)
                try:
                    yield lambda: self.losses.append(replay(self.batch))
                finally:
                    self.forward = self.model

        return captured
