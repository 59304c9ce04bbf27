"""Attach NA-LoRA and AdaLoRA to `transformers.Trainer` and its subclasses."""
