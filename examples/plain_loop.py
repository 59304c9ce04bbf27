"""Fine-tune with LoRA and NA-LoRA in a plain PyTorch loop, save the adapter, load it again and generate.

python examples/plain_loop.py MODEL DATA.jsonl OUTPUT     # DATA has one {"prompt": …, "completion": …} per line
"""

import json
import sys
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nalora

name, data, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name)
model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
# "update" scales the optimizer's steps: Adam divides a constant factor out of the gradients again.
controller = nalora.attach(model, optimizer, apply_to="update")

rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
for row in rows:
    prompt = tokenizer(row["prompt"]).input_ids
    ids = prompt + tokenizer(row["completion"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + ids[len(prompt) :]  # the loss is on the completion
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    loss.backward()
    controller.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(output)  # an ordinary LoRA adapter

model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), output).eval()
inputs = tokenizer(rows[0]["prompt"], return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(answer[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
