"""The trainers of other projects, started by their own Python functions, with `attach_trainer` called by hand.

python attached_scripts.py llamafactory|swift|trl|axolotl ARGUMENT...      # as for the project's own command
"""

from __future__ import annotations

import sys

import nalora

SETTINGS = {"apply_to": "update", "keep_ratio": 0.2}


def llamafactory(file: str) -> None:
    from llamafactory.train.sft import workflow
    from llamafactory.train.tuner import run_exp

    class Attached(workflow.CustomSeq2SeqTrainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            nalora.attach_trainer(self, **SETTINGS)

    workflow.CustomSeq2SeqTrainer = Attached
    sys.argv[1:] = [file]
    run_exp()


def swift(*arguments: str) -> None:
    from swift.pipelines.train.sft import SwiftSft

    class Attached(SwiftSft):
        def train(self, trainer):
            nalora.attach_trainer(trainer, **SETTINGS)
            return super().train(trainer)

    Attached(list(arguments)).main()


def trl(*arguments: str) -> None:
    import datasets
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

    script, config, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(list(arguments))
    rows = datasets.load_dataset(script.dataset_name)["train"]
    trainer = SFTTrainer(model.model_name_or_path, config, train_dataset=rows, peft_config=get_peft_config(model))
    nalora.attach_trainer(trainer, **SETTINGS)
    trainer.train()
    trainer.save_model()


def axolotl(file: str) -> None:
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer

    cfg = load_cfg(file)
    trainer, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    nalora.attach_trainer(trainer, **SETTINGS)
    trainer.train()
    trainer.save_model(cfg.output_dir)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
