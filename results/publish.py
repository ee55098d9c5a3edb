"""What the scripts in this folder share: they read final losses and write tables in pages."""
import json
import math
import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP))
from nanodepth import data, inside, runs  # noqa: E402
from nanodepth.devices import find_device  # noqa: E402


def final_loss(run):
    """The validation loss at the last step; inf if the run has not begun, has not finished or diverged."""
    rows = runs.log_rows(run / "log.jsonl", math.inf)
    steps = rows and json.loads((run / "config.json").read_text())["options"]["max_steps"]
    loss = next((row["loss"] for row in rows if row["kind"] == "val" and row["step"] == steps), math.inf)
    return loss if loss is not None and math.isfinite(loss) else math.inf


def copying(run):
    """inside.copying() of a finished run on the tokens of its validations, in fp32."""
    device = find_device()
    model, config = runs.load(run, device)
    options = config["options"]
    batches = data.run_data(run, config).val_batches(options["eval_tokens"], 16, options["seq_len"])
    return inside.copying(model, ((idx.to(device), targets.to(device)) for idx, targets in batches))


def criterion(run):
    """The column by which learning rates are chosen: the loss on targets that are not copyable, if these are most."""
    return "loss" if float(run["share"] or 0) > 0.5 else "others"


def markdown(head, rows):
    """A Markdown table of texts."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def fill(readme, **parts):
    """Writes each NAME=text of `parts` into the file `readme`, between <!-- NAME --> and the next <!-- end -->."""
    text = readme.read_text()
    for name, part in parts.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{part}\n{found[2]}", text,
                      flags=re.S)
    readme.write_text(text)
