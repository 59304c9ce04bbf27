"""LoRA in a plain PyTorch loop with fused layers, compared with PEFT's own layers on the first row.

python examples/fused_layers.py MODEL DATA.jsonl OUTPUT     # DATA has one {"prompt": …, "completion": …} per line
"""

import json
import sys
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nalora

name, data, output = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device)
model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
layers = nalora.fuse(model)  # base="fp8" also stores the frozen weights in FP8
print(layers)

for number, line in enumerate(Path(data).read_text().splitlines()):
    row = json.loads(line)
    ids = tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token, return_tensors="pt").input_ids.to(device)
    batch = {"input_ids": ids, "labels": ids}
    if number == 0:
        layers.check(batch)  # loss and gradients of the fused layers and of PEFT's
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(output)  # an ordinary LoRA adapter
