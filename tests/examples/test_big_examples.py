"""Every configuration of the project plans and fits its stated hardware; the examples' figures are the plan's."""

import json
import re
from pathlib import Path

import pytest
from needed import ROOT
from typer.testing import CliRunner

from trace_megatron.cli import app
from trace_megatron.config import load_config
from trace_megatron.errors import UserError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "examples").glob("**/config.yaml"))
BIG = [path for path in CONFIGS if path.with_name("README.md").exists()]
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
CALCULATOR = SMOLLM2 | {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32,
}  # fmt: skip


def name(path: Path) -> str:
    return path.parent.name if path.name == "config.yaml" else path.stem


@pytest.fixture
def models(trace_data, tmp_path, monkeypatch):
    """A working folder with the config.json of every model that a configuration names."""
    shapes = {"smollm2-135m-instruct": SMOLLM2, "calculator": CALCULATOR}
    for path in (trace_data / "models" / "configs").glob("*.json"):
        shapes[path.stem] = json.loads(path.read_text())
    for model, shape in shapes.items():
        folder = tmp_path / "models" / model
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(shape))
    monkeypatch.chdir(tmp_path)


def plan(path: Path) -> str:
    result = CliRunner().invoke(app, ["plan", "-c", str(path)])
    assert result.exit_code == 0, result.exception
    return result.output


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_every_configuration_fits_its_hardware(models, path):
    assert "all while training" in plan(path)


@pytest.mark.parametrize("option", ["engine.tensor_parallel", "engine.num_engines", "engine.max_num_seqs"])
def test_a_plan_of_no_engine_is_refused(models, option):
    arguments = ["plan", "-c", str(ROOT / "configs" / "quickstart.yaml"), f"{option}=0"]
    with pytest.raises(UserError, match=f"expected {option} of at least 1, found 0"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_examples_are_there():
    assert {"qwen3_8b_hotpotqa", "llama32_3b_hotpotqa", "qwen3_14b_deepscaler", "qwen3_14b_bfcl", "qwen3_32b"} <= {
        name(path) for path in BIG
    }


@pytest.mark.parametrize("path", BIG, ids=name)
def test_the_readme_states_the_plan(models, path):
    """To 5 %: a better estimate of the plan is welcome to stay within its rounding here."""
    readme = path.with_name("README.md").read_text()
    for line in plan(path).splitlines():
        figures = re.compile(re.escape(re.sub(r"[\d.,]*\d", "#", line.strip())).replace(r"\#", r"([\d.,]*\d)"))
        stated = next((match for match in map(figures.fullmatch, map(str.strip, readme.splitlines())) if match), None)
        assert stated, f"not in {path.with_name('README.md')}: {line}"
        for found, expected in zip(figures.fullmatch(line.strip()).groups(), stated.groups(), strict=True):
            assert float(expected.replace(",", "")) == pytest.approx(float(found.replace(",", "")), rel=0.05, abs=0.1)


@pytest.mark.parametrize("path", BIG, ids=name)
def test_the_readme_launches_on_the_nodes_of_the_layout(path):
    ranks = load_config(path).policy.num_ranks
    for nodes, gpus in re.findall(r"--nodes (\d+) --gpus (\d+)", path.with_name("README.md").read_text()):
        assert int(nodes) * int(gpus) == ranks


SETTINGS = {  # arXiv 2606.11119: candidates, M, N, turns, prompt, response, temperature, top-p, advantage, epochs, rate
    "retrieval": (512, 1024, 2, 5, 2048, 6144, 1.0, 1.0, "tree_rpo", 2, 3e-5),
    "python_tool": (256, 512, 2, 5, 2048, 14336, 0.6, 0.95, "tree_rpo", 4, 1.5e-5),
    "bfcl": (256, 512, 2, 40, 12800, 8192, 0.9, 1.0, "tree_grpo", 2, 3e-5),
}


@pytest.mark.parametrize("path", BIG, ids=name)
def test_the_examples_have_the_papers_settings(path):
    config = load_config(path)
    budget, rollout, loss = config.budget, config.rollout, config.loss
    assert SETTINGS[config.env.name] == (
        *(budget.candidates, budget.rollouts, budget.continuations),
        *(rollout.max_turns, rollout.max_prompt_tokens, rollout.max_response_tokens),
        *(rollout.temperature, rollout.top_p),
        *(config.method.advantage, config.predictor.epochs, config.predictor.learning_rate),
    )
    assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.2, 0.28, 0.0)
    assert config.engine.colocated  # the planned memory is that of engines that sleep while the trainer works
    assert (config.optimizer.learning_rate, config.optimizer.clip_grad) == (1e-6, 1.0)
