"""All eleven methods on a real model: SmolLM2-135M, fifty steps on the CPU, saved, loaded on the stock base, merged."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

from nalora.models.loading import ModelSpec, load
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

# Learning rates that suit each method: full fine-tuning and starts from the gradient want lower ones.
ELEVEN = [
    {"method": "full", "learning_rate": 3e-5},
    {"method": "lora", "learning_rate": 1e-3},
    {"method": "rslora", "learning_rate": 5e-4},
    {"method": "adalora", "learning_rate": 1e-2},
    {"method": "dora", "learning_rate": 1e-3},
    {"method": "lora+", "learning_rate": 2e-4},
    {"method": "pissa", "learning_rate": 2e-4},
    {"method": "lora-ga", "learning_rate": 1e-4, "gradient_batches": 4},
    {"method": "lora-pro", "learning_rate": 3e-4},
    {"method": "lora-pro", "mode": "full", "learning_rate": 1e-4},
    {"method": "gora", "learning_rate": 1e-4, "gradient_batches": 4},
    {"method": "na-lora", "learning_rate": 1e-3},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", ELEVEN, ids=lambda options: "-".join(str(v) for v in options.values()))
def test_fifty_steps_lower_the_loss_and_the_adapter_is_stock(tmp_path, options):
    settings = {
        "model": "smollm2-135m", "task": "gym/chain_sum", "train_size": 100, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}, "output": str(tmp_path / "run"),
        "steps": 50, "batch_size": 2, "device": "cpu", "dtype": "float32", "log_every": 1, "max_norm": 1.0,
    }  # fmt: skip
    ids = torch.tensor([load(ModelSpec("smollm2-135m")).processor("The sum of 17 and 25 is 42.").input_ids])
    before, after, trained = {}, {}, {}

    class Ask(transformers.TrainerCallback):
        """The mean loss of the first 16 training examples, and after training the model's own answer."""

        def on_train_begin(self, args, state, control, *, model, train_dataloader, **_):
            before["loss"] = mean_loss(model, train_dataloader)

        def on_train_end(self, args, state, control, *, model, train_dataloader, **_):
            after["loss"] = mean_loss(model, train_dataloader)
            with torch.no_grad():
                trained["logits"] = model.eval()(input_ids=ids).logits

    @torch.no_grad()
    def mean_loss(model, loader):
        was_training = model.training
        loss = model.eval()(**loader.collate_fn(loader.dataset.rows[:16])).loss.item()
        model.train(was_training)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        build = transformers.Trainer.__init__

        def with_callback(self, *args, **kwargs):
            build(self, *args, **kwargs)
            self.add_callback(Ask())

        patch.setattr(transformers.Trainer, "__init__", with_callback)
        train(check({**settings, **options}))
    folder = RunFolder(settings["output"])
    assert after["loss"] < 0.9 * before["loss"]
    if folder.model.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder.model).eval()
    else:
        stock = load(ModelSpec("smollm2-135m", device="cpu", dtype="float32")).model
        adapted = peft.PeftModel.from_pretrained(stock, folder.adapter).eval()
        with torch.no_grad():
            loaded = adapted(input_ids=ids).logits
        assert (loaded - trained["logits"]).norm() <= 1e-4 * trained["logits"].norm()
        model = adapted.merge_and_unload()
    with torch.no_grad():
        merged, exact = model(input_ids=ids).logits, trained["logits"]
    assert (merged - exact).norm() <= 1e-4 * exact.norm()
