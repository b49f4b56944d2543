"""`launch --dry-run` of every example, by its README's own command: the golden files in golden/.

After a wanted change: TRACE_UPDATE_GOLDEN=1 pytest tests/launch/test_dry_run.py, and read the difference.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from needed import ROOT

from trace_megatron.config import load_config

GOLDEN = Path(__file__).parent / "golden"
CASES = [(readme, []) for readme in sorted((ROOT / "examples").glob("*/README.md"))]
CASES.append((ROOT / "examples" / "qwen3_32b" / "README.md", ["--server-nodes", "4", "--env-servers", "2"]))
CONFIG = re.compile(r"<<'CONFIG'\n(.*?)CONFIG\n", re.DOTALL)
ENV = re.compile(r"<<'ENV' &\n(.*?)ENV\n", re.DOTALL)


def launch_command(readme: Path) -> list[str]:
    """Under the heading Launch: what stands after `launch`."""
    block = readme.read_text().split("## Launch\n")[1].split("## ")[0]
    lines = [line.strip().removesuffix("\\") for line in block.splitlines() if line.startswith("    ")]
    return shlex.split(" ".join(lines).split(" launch ")[1])


def configurations(text: str, folder: Path) -> list:
    """The configurations inside the scripts; an option that came later has its default in an older file."""
    found = []
    for number, match in enumerate(CONFIG.findall(text)):
        path = folder / f"{number}.yaml"
        path.write_text(match)
        found.append(load_config(path))
    return found


@pytest.mark.parametrize(
    ("readme", "more"), CASES, ids=[f"{readme.parent.name}{'-servers' if more else ''}" for readme, more in CASES]
)
def test_golden(launch, readme, more, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # Two jobs of the chain show all that there is to see.
    arguments = [*launch_command(readme), "--chain", "2", "--workdir", "/shared/project", "--dry-run", *more]
    result = launch(*arguments, NEMORUN_HOME="/shared/nemo_home")
    assert result.returncode == 0, result.stderr
    golden = GOLDEN / f"{readme.parent.name}{'_servers' if more else ''}.txt"
    if os.environ.get("TRACE_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(result.stdout)
    expected = golden.read_text()
    scripts, expected_scripts = (CONFIG.sub("", ENV.sub("", text)) for text in (result.stdout, expected))
    assert scripts == expected_scripts
    for number, section in enumerate(ENV.findall(result.stdout)):
        path = tmp_path / f"env{number}.yaml"
        path.write_text(section)
        assert load_config(path).env == load_config(readme.with_name("config.yaml")).env
    stated = configurations(expected, tmp_path)
    assert configurations(result.stdout, tmp_path) == stated and len(stated) == result.stdout.count("# job ")
    assert stated[0] == load_config(readme.with_name("config.yaml"))
