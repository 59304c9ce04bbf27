"""Fine-tune with transformers.Trainer, save the adapter, load it again and generate.

python examples/trainer.py MODEL DATA.jsonl OUTPUT     # DATA has one {"prompt": …, "completion": …} per line
"""

import sys

import datasets
import peft
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import nalora

name, data, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def encode(row: dict) -> dict:
    prompt = tokenizer(row["prompt"]).input_ids
    completion = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


rows = datasets.Dataset.from_json(data)
trainer = Trainer(
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(name), lora),
    TrainingArguments(output, learning_rate=1e-3, per_device_train_batch_size=4, report_to="none"),
    train_dataset=rows.map(encode, remove_columns=rows.column_names),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
)
nalora.attach_trainer(trainer, apply_to="update")
trainer.train()
trainer.save_model(output)

model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), output).eval()
inputs = tokenizer(rows[0]["prompt"], return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
