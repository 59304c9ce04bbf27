"""NA-LoRA at work: find blocks, plan, observe, decide, apply, save."""
