"""How long is a training step, and how much memory does it take, for LoRA and NA-LoRA at the shapes of Llama-3.1-8B?

python benchmarks/training_step.py [--batch 4] [--length 1024] [--checkpointing] [--rounds 3] [--steps 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import harness
import peft
import torch
import transformers
from paper_hooks import PaperHooks

import nalora


def build(layers: int, checkpointing: bool, liger: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0, max_position_embeddings=8192,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


class Setup:
    """One model and its optimizer; variants attach to it and detach again."""

    def __init__(self, model: torch.nn.Module, batch: int, length: int) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        self.ids = torch.randint(0, 128256, (batch, length), device="cuda")
        self.controller = None
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        if self.controller is not None:
            self.controller.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    @contextlib.contextmanager
    def plain(self) -> Iterator:
        yield self.step

    @contextlib.contextmanager
    def paper(self) -> Iterator:
        hooks = PaperHooks(self.model)
        yield self.step
        hooks.remove()

    def ours(self, **options):
        @contextlib.contextmanager
        def attached() -> Iterator:
            self.controller = nalora.attach(self.model, self.optimizer, **options)
            yield self.step
            self.controller.detach()
            self.controller = None

        return attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    parser.add_argument("--no-liger", action="store_true")
    args = parser.parse_args()

    plain = Setup(build(args.layers, args.checkpointing, liger=False), args.batch, args.length)
    variants = {
        "PEFT LoRA": plain.plain,
        "paper's hooks": plain.paper,
        "NA-LoRA, model untouched": plain.ours(),
        "NA-LoRA, fused activation": plain.ours(kernels="fused-activation"),
        "NA-LoRA, fused LoRA layers": plain.ours(kernels="fused"),
    }
    resident = torch.cuda.memory_allocated() / 2**30
    shared = {name: plain for name in variants}
    if not args.no_liger:
        liger = Setup(build(args.layers, args.checkpointing, liger=True), args.batch, args.length)
        variants["PEFT LoRA + Liger"] = liger.plain
        variants["NA-LoRA, everything on"] = liger.ours(kernels="fused")
    other = torch.cuda.memory_allocated() / 2**30 - resident
    results = harness.interleave(variants, args.rounds, args.steps, args.warmup)
    setting = f"llama-8b shapes, {args.layers} layers, {args.batch}x{args.length}, checkpointing={args.checkpointing}"
    rows = []
    base = results["PEFT LoRA"]
    for name, result in results.items():
        result["peak_gib"] = round(result["peak_gib"] - (other if name in shared else resident), 3)
        rows.append({"question": "training step", "setting": setting, "variant": name, "unit": "ms", **result})
    for name, result in results.items():
        time, memory = result["p50"] / base["p50"], result["peak_gib"] / base["peak_gib"]
        print(f"{name:32s} {result['p50']:8.2f} ms  {time:6.4f}   {result['peak_gib']:7.2f} GiB  {memory:6.4f}  "
              f"[{result['p20']:.2f} … {result['p80']:.2f}]")  # fmt: skip
    harness.append(rows, args.rows)
    print(json.dumps({"last losses": [plain.losses[-1].item()]}))


if __name__ == "__main__":
    main()
