"""What differs between the versions of PEFT, transformers and Accelerate that nalora runs with.

pyproject.toml has the oldest versions and `make test-oldest` tests them. Whatever needs a newer one is refused here by
the version that has it, because the older one would train or load something else without an error.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from nalora.errors import NALoRAError

# The first PEFT with each tuner; those of the oldest version are left out.
TUNERS = {
    **dict.fromkeys(("adamss", "gralora", "lily", "peanut", "psoft", "pvera", "tinylora"), "0.19"),
    **dict.fromkeys(("beft", "deft", "frod", "glora", "hira", "unilora"), "0.20"),
    "supertuning": "0.21",
}
# The first PEFT that adapts the experts of a model whose layers are named (gate_proj, w1, …).
EXPERTS_BY_NAME = "0.19"
# Before this version Accelerate loads an FSDP2 checkpoint of a PEFT model without an error and with other adapters: a
# resumed run differed by 10 % from an uninterrupted one.
FSDP2_RESUMES = "1.13"

# The oldest transformers with which tokenizers of GGUF files were tested. With 5.5 a tokenizer that was saved adds BOS
# where the file's header says no.
GGUF_TOKENIZERS = "5.17"


def is_older(package: str, needed: str) -> bool:
    """Return whether the installed version of a package is older than the needed one, such as ``0.19``."""
    return _release(version(package)) < _release(needed)


def require(package: str, needed: str, *, where: str, what: str, otherwise: str = "") -> None:
    """Raise NALoRAError if the package is older than needed.

    Args:
        package: its name on PyPI.
        needed: the first version that can do it.
        where: the setting or the call that asks for it.
        what: what older versions cannot do, as the end of "which does not …".
        otherwise: what can be done with the installed version.
    """
    if is_older(package, needed):
        raise NALoRAError(
            where,
            found=f"{package} {version(package)}, which does not {what}",
            expected=f"{package} {needed} or later",
            fix=f"pip install '{package}>={needed}'" + (f", or {otherwise}" if otherwise else ""),
        )


def require_fsdp2_resume(checkpoint: str) -> None:
    """Raise NALoRAError if Accelerate would load other adapters from an FSDP2 checkpoint than were saved."""
    where = f"resume_from_checkpoint={checkpoint!r}"
    require("accelerate", FSDP2_RESUMES, where=where, what="load the adapters of an FSDP2 checkpoint")


def counts_first_labels(model: Any) -> bool:
    """Return whether Trainer counts the first label of each row although the model's loss, which shifts them, does not.

    It did before transformers 5.10: the mean loss of rows of 8 tokens was too small by 1/8.
    """
    if not is_older("transformers", "5.10"):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of major and minor version: 5.10.4 is (5, 10)."""
    return tuple(int(part) for part in text.split(".")[:2])
