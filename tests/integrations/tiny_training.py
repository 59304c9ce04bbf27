"""A training with transformers.Trainer that does not know nalora, for `nalora launch`.

python tiny_training.py FOLDER lora|attention|full|nothing [CHECKPOINT]
"""

from __future__ import annotations

import sys
from pathlib import Path


def make_trainer(folder: Path, kind: str = "lora"):
    import test_trainer
    import tiny
    import torch

    model = tiny.llama(torch.float32, target_modules=["q_proj"] if kind == "attention" else "all-linear")
    if kind == "full":
        model = model.unload().requires_grad_()
    return test_trainer.make_trainer(folder, model, save_strategy="steps", save_steps=2, data=test_trainer.rows(16))


if __name__ == "__main__":
    folder, kind, *checkpoint = sys.argv[1:]
    trainer = make_trainer(Path(folder), kind)
    if kind != "nothing":
        trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
        trainer.save_model(folder)
