"""Unpack the peers' kernels into a folder that git ignores, for training_step.py --peers.

python benchmarks/prepare_peers.py [build/peers] [--wheels FOLDER] [--four-bit]

Only single modules of the peers' wheels are unpacked, unchanged. The `__init__.py` files are empty in place of the
packages' own, which patch the whole process at import and need packages that no kernel needs. Nothing of this folder
is committed. PEFT and Liger are unpacked too, for machines where they are not installed and nothing can be installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "build" / "peers"
PACKAGES = ["unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "axolotl==0.21.0", "liger-kernel==0.8.5", "peft==0.21.0"]
FOUR_BIT = "bitsandbytes==0.50.2"
# The modules that the kernels import, as patterns of paths in the wheels.
SINGLE_MODULES = {
    "unsloth": r"unsloth/(kernels/[a-z0-9_]+|device_type|bnb_availability|import_fixes)\.py",
    "unsloth_zoo": r"unsloth_zoo/(fused_losses/[a-z0-9_]+|device_type|log|utils|tiled_mlp|gradient_checkpointing"
    r"|temporary_patches/(common|utils)|mlx/runtime)\.py",
    "axolotl": r"axolotl/(kernels/[a-z0-9_]+|utils/(logging|distributed))\.py",
}
# Of the libraries for every version of CUDA only the newest ones: 8 MB in place of 150.
WHOLE = {
    "liger_kernel": r"liger_kernel.*",
    "peft": r"peft.*",
    "bitsandbytes": r"bitsandbytes.*(?<!\.so)|bitsandbytes/libbitsandbytes_(cpu|cuda130|cuda132)\.so",
}


def download(folder: Path, packages: list[str]) -> None:
    # The wheels hold Python source: a tag of any supported version serves.
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--dest", str(folder)]
    for package in packages:
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, package]
        if subprocess.run(command, check=False).returncode:
            print(f"not available: {package}")


def unpack(wheel: Path, folder: Path) -> int:
    """Write the modules of one wheel below the folder; return their number."""
    package = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        if package in SINGLE_MODULES:
            pattern = SINGLE_MODULES[package]
            names = [name for name in archive.namelist() if re.fullmatch(pattern, name) and "__init__" not in name]
            for parent in {parent for name in names for parent in Path(name).parents if parent.name}:
                (folder / parent).mkdir(parents=True, exist_ok=True)
                (folder / parent / "__init__.py").write_text("")
            # Versions are read from the metadata.
            names += [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        else:
            names = [name for name in archive.namelist() if re.fullmatch(WHOLE[package], name)]
        archive.extractall(folder, names)
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels (default: download them with pip)")
    parser.add_argument("--four-bit", action="store_true", help="bring bitsandbytes too, 8 MB of compiled code")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.wheels is None:
            download(Path(scratch), [*PACKAGES, *([FOUR_BIT] if args.four_bit else [])])
        for wheel in sorted((args.wheels or Path(scratch)).glob("*.whl")):
            if wheel.name.split("-")[0] in {*SINGLE_MODULES, *WHOLE}:
                print(f"{wheel.name}: {unpack(wheel, args.folder)} files in {args.folder}")


if __name__ == "__main__":
    main()
