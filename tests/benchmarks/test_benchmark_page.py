"""The page holds what was measured, with goals reached or not, and nothing else."""

from __future__ import annotations

import details_page
import first_screen
import harness
import page
import peers_page
import pytest

SETTING = "llama-3.1-8b shapes, 32 layers, 4x1024, r=8, bf16 base"


def row(variant: str, p50: float | None, gib: float = 0.0, setting: str = SETTING, run: str = "a", **others):
    known = {"question": peers_page.QUESTION, "setting": setting, "variant": variant, "run": run, "device": "GPU",
             "p50": "" if p50 is None else str(p50), "p20": str(p50), "p80": str(p50),
             "peak_gib": str(gib)}  # fmt: skip
    return dict.fromkeys(harness.COLUMNS, "") | known | others


def lines(section, rows) -> str:
    return "\n".join(section(rows))


def test_no_rows_no_sections():
    for section in (peers_page.beside_peers, peers_page.by_rank, peers_page.profiles, peers_page.tiles):
        assert lines(section, [row("PEFT LoRA", 1.0, question="growth")]) == ""


def test_goals_are_marked():
    rows = [
        row("PEFT LoRA", 400.0, 48.0), row("Unsloth", 270.0, 30.0),
        row("Axolotl's LoRA kernels", None, note="missing: x"),
        row(peers_page.GRAPHS, 250.0, 29.0), row(peers_page.FP8_GRAPHS, 210.0, 20.0),
    ]  # fmt: skip
    text = lines(peers_page.beside_peers, rows)
    assert "everything on, cuDNN attention, CUDA graphs: time relative to PEFT LoRA 0.625, goal ≤ 0.63: reached" in text
    assert "everything on, cuDNN attention, CUDA graphs: time relative to Unsloth 0.926, goal ≤ 0.93: reached" in text
    assert (
        "FP8 base, cuDNN attention, CUDA graphs: time relative to PEFT LoRA 0.525, goal ≤ 0.52: **not reached**" in text
    )
    assert "FP8 base, cuDNN attention, CUDA graphs: memory relative to PEFT LoRA 0.417, goal ≤ 0.5: reached" in text
    assert "| Axolotl's LoRA kernels | missing: x |" in text


def test_ratios_are_within_a_run():
    rows = [row("PEFT LoRA", 400.0), row("Unsloth", 200.0), row("PEFT LoRA", 100.0, run="b"),
            row(peers_page.GRAPHS, 60.0, run="b"), row("Unsloth", None, run="b", note="failed: x")]  # fmt: skip
    text = lines(peers_page.beside_peers, rows)
    assert "relative to PEFT LoRA 0.600" in text
    assert "CUDA graphs: time relative to Unsloth" not in text
    # A failure does not hide the time of an earlier run.
    assert "| Unsloth * | 200.0" in text


def test_rows_are_of_the_latest_run_whichever_variant_it_measured():
    rows = [row("PEFT LoRA", 400.0, commit="old"), row("Unsloth", 200.0, run="b", commit="new")]
    text = lines(peers_page.beside_peers, rows)
    assert "commit new." in text
    assert "Variants with a * are from earlier runs (commit old)." in text
    assert "| PEFT LoRA * | 400.0" in text
    assert "| Unsloth | 200.0" in text


@pytest.mark.parametrize(("slow", "verdict"), [(280.0, "1.120, goal ≤ 1.12: reached"), (290.0, "**not reached**")])
def test_step_by_rank(slow, verdict):
    rows = [row(peers_page.GRAPHS, 250.0, 29.0), row("PEFT LoRA", 400.0, 48.0)]
    assert lines(peers_page.by_rank, rows) == ""
    large = SETTING.replace("r=8", "r=128")
    rows += [row(peers_page.GRAPHS, slow, 33.0, large, "b"), row("PEFT LoRA", 500.0, 52.0, large, "b")]
    text = lines(peers_page.by_rank, rows)
    assert "| variant | r = 8 | r = 128 |" in text
    assert verdict in text


def test_ranks_are_compared_within_a_commit():
    large = SETTING.replace("r=8", "r=128")
    rows = [row(peers_page.GRAPHS, ms, 30.0, setting, commit=commit) for setting, ms, commit in
            ((SETTING, 100.0, "old"), (large, 110.0, "old"), (SETTING, 105.0, "new"))]  # fmt: skip
    text = lines(peers_page.by_rank, rows)
    assert "time at r = 128 relative to r = 8 1.100" in text
    assert "105.0" not in text


def test_the_readmes_table_is_of_one_run():
    graphed = "nalora.fuse + Liger, cuDNN attention, CUDA graphs"
    rows = [row(graphed, 90.0, 4.0), row("PEFT LoRA", 200.0, 10.0, run="b"), row("Unsloth", 150.0, 5.0, run="b"),
            row("nalora.fuse", 120.0, 6.0, run="b")]  # fmt: skip
    text = "\n".join(first_screen.table(rows))
    for expected in ("| PEFT LoRA | 200 ms | 10.0 GiB |", "| 150 ms (0.75) | 5.0 GiB (0.50) |", "| 120 ms (0.60) |"):
        assert expected in text
    assert "90 ms" not in text
    # A later run that does not compare them does not empty the table.
    later = [row("PEFT LoRA", 210.0, 10.0, run="c"), row(peers_page.COMPILED, 130.0, 6.0, run="c")]
    assert "\n".join(first_screen.table([*rows, *later])) == text


def test_the_readme_in_the_repository_has_the_table_of_the_rows():
    readme = page.README.read_text(encoding="utf-8")
    assert first_screen.filled(readme, harness.read()) == readme
    assert all(line in readme for line in first_screen.table(harness.read()))


def test_long_context_and_four_bits_have_their_own_goals():
    long = "llama-3.1-8b shapes, 32 layers, 1x16384, r=8, bf16 base, gradient checkpointing"
    four_bit = SETTING.replace("bf16", "NF4")
    rows = [row("PEFT LoRA + Liger", 100.0, 30.0, long), row("NA-LoRA, everything on", 89.0, 31.0, long),
            row("Unsloth", 100.0, 20.0, four_bit, "b"),
            row("NA-LoRA, everything on", 99.0, 19.0, four_bit, "b")]  # fmt: skip
    text = lines(peers_page.beside_peers, rows)
    assert "time relative to PEFT LoRA + Liger 0.890, goal ≤ 0.9: reached" in text
    assert "memory relative to PEFT LoRA + Liger 1.033, goal ≤ 1.0: **not reached**" in text
    assert "time relative to Unsloth 0.990, goal ≤ 1.0: reached" in text


def test_goals_of_the_other_tables_are_marked():
    names = {"PEFT LoRA": 100.0, "PEFT LoRA, graph": 30.0, "NA-LoRA, graph": 25.0}
    text = lines(page.small_model, [row(name, ms, question="small model") for name, ms in names.items()])
    assert "| 3.33 | ≥ 4 **not reached** |" in text
    assert "| 4.00 | ≥ 4 reached |" in text
    rows = [row(name, 1.0306, question="cpu step", unit=unit) for name, unit in (("a", "ratio"), ("b", "share"))]
    text = lines(page.cpu, rows)
    assert "| a | ratio | 1.0306 | 1.0306 | 1.0306 | ≤ 1.03 **not reached** |" in text
    assert "| b | share | 1.0306 | 1.0306 | 1.0306 |  |" in text


def test_settings_are_in_the_order_of_ranks_then_four_bits_then_length():
    ordered = [SETTING, SETTING.replace("r=8", "r=32"), SETTING.replace("r=8", "r=128"), SETTING.replace("bf16", "NF4"),
               SETTING.replace("4x1024", "2x8192"), SETTING.replace("4x1024", "1x16384")]  # fmt: skip
    rows = [row("PEFT LoRA", 1.0, setting=setting) for setting in (*ordered[2:], *ordered[:2])]
    text = lines(peers_page.beside_peers, rows)
    assert [line.removeprefix("## ") for line in text.split("\n") if line.startswith("## ")] == ordered


def test_profiles_of_variants_are_columns():
    rows = [row(part, ms, setting=f"{SETTING}: {variant}", question=peers_page.PROFILE)
            for variant, parts in {"A": {"loss": 5.0, "step": 9.0}, "B": {"rope": 2.0, "step": 8.0}}.items()
            for part, ms in parts.items()]  # fmt: skip
    text = lines(peers_page.profiles, rows)
    assert "FP8" not in text
    on_fp8 = [entry | {"setting": f"{SETTING}: A, FP8 base"} for entry in rows]
    assert peers_page.FP8_PRODUCTS in lines(peers_page.profiles, on_fp8)
    for expected in ("| part | A | B |", "| loss | 5.0 |  |", "| rope |  | 2.0 |", "| step | 9.0 | 8.0 |"):
        assert expected in text


def test_the_page_in_the_repository_is_what_its_rows_say():
    assert page.PAGE.read_text() == page.page(harness.read())


def test_tiles_by_rank():
    rows = [row(name, ms, setting="forward, r=64", question=peers_page.TILES, note=tile)
            for name, ms, tile in (("now", 0.2, "Tile(16)"), ("fastest", 0.1, "Tile(32)"))]  # fmt: skip
    assert "| forward, r=64 | Tile(16) | 200.0 | Tile(32) | 100.0 |" in lines(peers_page.tiles, rows)


def test_launches_small_models_and_gradients_have_their_tables():
    where = "tiny shapes, 1x64"
    rows = [row(part, ms, setting=f"{where}: PEFT LoRA", question=peers_page.LAUNCHES)
            for part, ms in (("forward", 70.0), ("step", 160.0))]  # fmt: skip
    assert "| PEFT LoRA | 70.0 | 160.0 |" in lines(details_page.launches, rows)
    rows = [row(name, ms, question=details_page.IN_TRAINER) for name, ms in (("eager", 200.0), ("graphs", 50.0))]
    text = lines(details_page.in_trainer, [*rows, row("fused, graphs", 80.0, question=details_page.IN_TRAINER)])
    assert "| eager | 200.0 (200.0 … 200.0) | 1.00 |  |" in text
    assert "| graphs | 50.0 (50.0 … 50.0) | 4.00 | ≥ 3 reached |" in text
    assert "| 2.50 | ≥ 3 **not reached** |" in text
    whole = {
        "loss_difference": "0.01",
        "gradient_error": "0.27",
        "worst_layer": "layers.1.q_proj",
        "worst_cosine": "0.8",
    }
    rows = [row("q_proj", 0.96, question=details_page.FP8_GRADIENTS, worst_cosine="0.8"),
            row("all layers", None, question=details_page.FP8_GRADIENTS, **whole)]  # fmt: skip
    text = lines(details_page.fp8_gradients, rows)
    assert "| q_proj | 0.960 | 0.960 … 0.960 | 0.800 |" in text
    assert "by 27% of their norm" in text
    rows = [row("weights alone", None, question=details_page.FP8_SOURCES, loss_difference="0.0131",
                gradient_error="0.278", worst_cosine="0.84336")]  # fmt: skip
    assert "| weights alone | 1.31 % | 27.8 % | 0.843 |" in lines(details_page.fp8_sources, rows)
    for section in (
        details_page.launches, details_page.in_trainer, details_page.fp8_gradients, details_page.fp8_sources,
    ):  # fmt: skip
        assert lines(section, [row("PEFT LoRA", 1.0)]) == ""
