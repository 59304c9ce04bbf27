"""NA-LoRA: find FFN blocks, plan, observe, decide, apply, save."""
