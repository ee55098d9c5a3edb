"""What the README states about the code is true."""
import difflib
import re
from pathlib import Path

import pytest

import models

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


ROWS = re.findall(r"^\| `(\w+)` \| .*arxiv", README, re.M)


@pytest.mark.parametrize("name", [n for n in ROWS if n in models.names() and n != "gpt"])
def test_table_has_the_size_of_each_diff(name):
    a, b = ((ROOT / "models" / f"{n}.py").read_text().splitlines() for n in ("gpt", name))
    diff = [line[0] for line in difflib.unified_diff(a, b, n=0, lineterm="")][2:]
    row = next(line for line in README.splitlines() if line.startswith(f"| `{name}`"))
    assert f"| +{diff.count('+')} -{diff.count('-')} |" in row


def test_models_presets_and_files_are_named():
    assert set(ROWS) & set(models.names()) >= {"gpt", "resformer", "exoformer", "satformer", "muddformer", "attnres"}
    for name in models.PRESETS:
        assert f"`{name}`" in README
    for path in re.findall(r"\]\((?!http|#)(.*?)\)", README):
        assert (ROOT / path).exists(), path


def test_install_lines_match_the_requirements():
    assert "pip install -r requirements.txt && python train.py\npip install -r requirements-dev.txt && python -m pytest\n" in README
    hard = {re.split(r"[=<>]", line)[0] for line in (ROOT / "requirements.txt").read_text().split()}
    assert hard == {"torch", "numpy", "tiktoken", "tqdm"}
