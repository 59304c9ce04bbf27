"""Run by a Python that has llama-cpp-python: tokens of texts and logits of token ids, for several GGUF files.

python llama_cpp_answers.py REQUEST.json ANSWERS.npz
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main(request: str, answers: str) -> None:
    results = {}
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    for number, one in enumerate(asked):
        # Keys and values of the attention in float32, as in transformers; by default they are float16.
        options = dict(type_k=0, type_v=0, flash_attn=False, n_threads=1, n_ctx=512, verbose=False)
        model = llama_cpp.Llama(one["file"], logits_all=True, **options)
        tokens = [model.tokenize(text.encode(), add_bos=True, special=True) for text in one["texts"]]
        results[f"{number}.tokens"] = np.array(json.dumps(tokens))
        for index, ids in enumerate(one["ids"]):
            model.reset()
            model.eval(ids)
            results[f"{number}.logits.{index}"] = np.array(model.scores[: len(ids)])
        if one.get("messages"):
            made = model.create_chat_completion(one["messages"], max_tokens=8, temperature=0.0)
            results[f"{number}.chat"] = np.array(made["choices"][0]["message"]["content"])
        model.close()
    np.savez(answers, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
