"""Supervised fine-tuning with TRL: one line attaches NA-LoRA.

python examples/trl_sft.py MODEL DATA.jsonl OUTPUT     # DATA: prompt/completion, or messages for chat models
"""

import sys

import datasets
import peft
import torch
from trl import SFTConfig, SFTTrainer

import nalora

name, data, output = sys.argv[1:]
trainer = SFTTrainer(
    name,
    args=SFTConfig(
        output, learning_rate=1e-3, per_device_train_batch_size=4, bf16=torch.cuda.is_available(), report_to="none"
    ),
    train_dataset=datasets.Dataset.from_json(data),
    peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
nalora.attach_trainer(trainer, apply_to="update")
trainer.train()
trainer.save_model(output)  # an ordinary LoRA adapter
