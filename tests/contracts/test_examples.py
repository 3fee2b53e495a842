"""Every example loads and passes the checks; the shipped example keeps the keys that users rely on."""

from pathlib import Path

import pytest

from megatron_grpo.config import check_config, deepspeed_settings, holds_sizes_alone, load_config, offloads
from megatron_grpo.sweep.spec import load_sweep

ROOT = Path(__file__).parents[2]
YAML = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "policy" not in path.parts)
SWEEPS = [path for path in YAML if "\narms:" in path.read_text(encoding="utf-8")]
REAL = [path for path in YAML if path.parent.name.startswith("smollm")]
"""Their model is too large to ship, so it is given on the command line."""
EXAMPLES = [path for path in YAML if path not in SWEEPS + REAL]
CONTRACT = {
    "model": {"path", "dtype"},
    "data": {"task", "val_size"},
    "reward": {"kind"},
    "parallel": {"tensor", "pipeline", "data", "reward_stage"},
    "boundary": {"codec", "rank", "payload", "basis", "commit", "links"},
    "anchor": {"enabled", "cadence", "delay", "beta", "bootstrap"},
    "merger": {"kind", "alpha"},
    "grpo": {
        "group_size",
        "prompts_per_step",
        "minibatches",
        "clip_low",
        "clip_high",
        "kl_coef",
        "entropy_coef",
    },
    "rollout": {"max_response", "temperature", "top_p", "top_k", "path"},
    "optim": {"lr", "warmup_ticks", "weight_decay", "clip"},
    "deepspeed": {"config"},
    "train": {"steps", "micro_batch", "eval_every", "save_every", "keep", "seed"},
    "logging": {"tensorboard", "wandb"},
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_loads_and_checks_clean(path: Path) -> None:
    config = load_config(path)
    assert check_config(config, sizes_alone=holds_sizes_alone(Path(config.model.path))) == []


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_example_of_a_real_model_lacks_nothing_else(path: Path) -> None:
    """On the tiny policy the one thing that is wrong is its few positions."""
    errors = check_config(load_config(path, ["model.path=examples/tiny/policy"]))
    assert [error for error in errors if "has 128 positions" not in error] == [] and len(errors) <= 1


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_sweep_loads_and_every_arm_checks_clean(path: Path) -> None:
    """Loading checks every arm, and that no two are the same."""
    assert len(load_sweep(path).arms) > 20


@pytest.mark.parametrize("path", sorted((ROOT / "deepspeed_configs").glob("*.json")), ids=lambda path: path.stem)
def test_each_shipped_deepspeed_file_says_what_its_name_does_and_agrees_with_the_example(path: Path) -> None:
    dtype = "bfloat16" if path.stem.endswith("bf16") else "float32"
    config = load_config(ROOT / "examples/tiny/k5.yaml", [f"deepspeed.config={path}", f"model.dtype={dtype}"])
    settings, stage = deepspeed_settings(config), int(path.stem.removeprefix("zero")[0])
    assert config.zero_stage == stage == settings["zero_optimization"]["stage"]
    assert check_config(config) == []
    assert settings["bf16"]["enabled"] == (dtype == "bfloat16")
    assert offloads(settings, "optimizer") == path.stem.endswith("offload")


def test_the_example_has_exactly_the_contracted_keys() -> None:
    import yaml

    written = yaml.safe_load((ROOT / "examples/tiny/k5.yaml").read_text())
    assert {section: set(values) for section, values in written.items()} == CONTRACT
