"""Preference optimisation with TRL's DPO: one line attaches NA-LoRA.

python examples/trl_dpo.py MODEL DATA.jsonl OUTPUT     # DATA has one {"prompt": …, "chosen": …, "rejected": …} per line
"""

import sys

import datasets
import peft
import torch
from trl import DPOConfig, DPOTrainer

import nalora

name, data, output = sys.argv[1:]
trainer = DPOTrainer(
    name,
    args=DPOConfig(
        output, learning_rate=1e-4, per_device_train_batch_size=4, bf16=torch.cuda.is_available(), report_to="none"
    ),
    train_dataset=datasets.Dataset.from_json(data),
    peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
nalora.attach_trainer(trainer, apply_to="update")
trainer.train()
trainer.save_model(output)  # an ordinary LoRA adapter
