"""Groups runs into systems, and compares the systems' losses. The runs of one system differ only in their seed."""
import json
import math
from pathlib import Path
from statistics import mean, median, mode, stdev

import models
from nanodepth.cli import UserError, one_line
from nanodepth.runs import log_rows

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
       2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
       2.042)  # 97.5% quantiles of Student's t for 1 .. 30 degrees of freedom
NO_RECIPE = {"model", "data", "out", "resume", "seed", "device", "threads", "compile", "deterministic", "micro_batch",
             "eval_every", "eval_tokens", "final_eval_tokens", "save_every", "wandb",       # these change no loss, and
             "sample_every", "tensorboard"}                                                 # older runs have these


# -------------------------------------------------------------------------------------------------------- runs, systems


def read_log(run):
    """{"run", "config", "seed", "train": rows, "val": rows} of a run folder, from its config.json and log.jsonl.

    A loss that was not finite is null in the log and nan here. UserError for a folder that is not a run, and for a run
    with fewer than two validations.
    """
    try:
        config = json.loads((Path(run) / "config.json").read_text(encoding="utf-8"))
        found = {"run": str(run), "config": config, "seed": config["options"]["seed"]}
        validated_on(found)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{run} is not the folder of a run with a readable config.json: {one_line(e)}") from None
    rows = log_rows(Path(run) / "log.jsonl", math.inf)
    found["train"] = [row for row in rows if row["kind"] == "train"]
    found["val"] = [{**row, "loss": math.nan if row["loss"] is None else row["loss"]}
                    for row in rows if row["kind"] == "val"]
    if len(found["val"]) < 2 or not found["train"]:
        raise UserError(f"{run} has only one validation: it has just begun, or was stopped")
    return found


def validated_on(run):
    """What a run's losses are measured on, in words: tokens (also of the last validation), sequence length, data."""
    data, options = run["config"]["data"], run["config"]["options"]
    tokens, final = options["eval_tokens"], options.get("final_eval_tokens") or options["eval_tokens"]
    return (f"{tokens:,} tokens" + (f" ({final:,} at the end)" if final != tokens else "")
            + f" in sequences of {options['seq_len']:,} of data with fingerprint {data['fingerprint']}")


def systems(runs):
    """{name: its runs}, one run per seed: the newest if there are several.

    The name is config["system"], without the options that all systems share. Runs of one system with other recipe()s
    become several systems, with the difference in their names.
    """
    kinds = {}
    for run in runs:                                                # an older run has no "system"
        kinds.setdefault(run["config"].get("system", run["config"]["model"]), []).append(run)
    shared = set.intersection(*(set(kind.split()[1:]) for kind in kinds)) if len(kinds) > 1 else set()
    found = {}
    for kind, some in kinds.items():
        differ = differences(map(recipe, some))
        for run in sorted(some, key=lambda run: (Path(run["run"]) / "log.jsonl").stat().st_mtime_ns):
            words = [word for word in kind.split() if word not in shared]
            words += [f"{name}={recipe(run).get(name)}" for name in differ]
            found.setdefault(" ".join(words), {})[run["seed"]] = run                # the newest comes last
    return {name: list(seeds.values()) for name, seeds in found.items()}


def recipe(run):
    """The options of a run's training that can change its loss, besides those of the model."""
    return {name: x for name, x in run["config"]["options"].items() if name not in NO_RECIPE}


def differences(recipes):
    """The names of the options in which recipes differ. An older run lacks newer options."""
    first = {}
    return list(dict.fromkeys(name for each in recipes for name, x in each.items() if first.setdefault(name, x) != x))


def find_baseline(groups):
    """The name of the baseline: a system of the registry's first model, gpt, or any system if gpt is missing.

    Of several, the one that ends after as many tokens as most systems do, with the fewest options in its name.
    """
    plain = [name for name in groups if name.split()[0] == models.names()[0]]
    ends = [end(some)[0] for some in groups.values()]
    return max(plain or groups, key=lambda name: (ends.count(end(groups[name])[0]), -len(name.split())))


# ---------------------------------------------------------------------------------------------------- curves, intervals


def curve(some):
    """[(tokens, mean loss over the seeds)] at the validations that all seeds have.

    Leaves out the last validation of a run with final_eval_tokens, which scores other tokens.
    """
    usual = mode(row.get("eval_tokens") for run in some for row in run["val"])
    at = [{row["tokens"]: row["loss"] for row in run["val"] if row.get("eval_tokens") == usual} for run in some]
    common = sorted(set.intersection(*map(set, at)))
    return [(tokens, mean(rows[tokens] for rows in at)) for tokens in common] or [end(some)]


def end(some):
    """(tokens, mean loss) of the last validation that all seeds have."""
    at = [{row["tokens"]: row["loss"] for row in run["val"]} for run in some]
    last = max(set.intersection(*map(set, at)))
    return last, mean(rows[last] for rows in at)


def gaps(some, base, tokens):
    """Losses after `tokens` tokens, minus those of the run in `base` with the same seed and so the same batches."""
    at = [{run["seed"]: row["loss"] for run in group for row in run["val"] if row["tokens"] == tokens}
          for group in (some, base)]
    return [at[0][seed] - at[1][seed] for seed in at[0] if seed in at[1]]


def interval(values):
    """(mean, half-width of its 95% interval by Student's t) of a sample; None where the sample is too small."""
    if len(values) < 2:
        return (values[0] if values else None), None
    return mean(values), t95(len(values) - 1) * deviation(values) / math.sqrt(len(values))


def deviation(values):
    """Standard deviation; nan if a value is not finite, for which statistics.stdev fails."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def t95(degrees):
    """The 97.5% quantile of Student's t; above 30 degrees of freedom by a formula, within 0.003."""
    return T95[degrees - 1] if degrees <= len(T95) else 1.96 + 2.4 / degrees


# --------------------------------------------------------------------------------------------------------------- tables


def summarise(groups, baseline):
    """{name: row of the table} for systems(), the baseline first, at the last validation that all seeds have."""
    rows, (length, _) = {}, end(groups[baseline])
    for name, some in {baseline: groups[baseline], **groups}.items():
        tokens, loss = end(some)
        ends = [row["loss"] for run in some for row in run["val"] if row["tokens"] == tokens]
        gap, half = interval(gaps(some, groups[baseline], tokens)) if tokens == length else (None, None)
        peaks = [max(row.get("peak_bytes", 0) for row in run["val"]) for run in some]
        speeds = [median(row["tok_s"] for row in run["train"]) for run in some]
        rows[name] = {
            "runs": [run["run"] for run in some], "seeds": [run["seed"] for run in some], "tokens": tokens,
            "loss": loss, "loss_sd": deviation(ends) if len(ends) > 1 else None,
            "difference": gap, "difference_95": half,
            "tok_s": mean(speeds), "tok_s_sd": deviation(speeds) if len(speeds) > 1 else None,
            "peak_bytes": mean(peaks) if min(peaks) else None, "curve": curve(some)}
    return rows


def table(rows, baseline):
    """The rows of summarise() as Markdown."""
    lines = [f"| system | seeds | tokens | final loss (nats) | difference to {baseline} (95% interval) | tokens/s "
             "| peak GiB |", "|---|---|---|---|---|---|---|"]

    def cell(value, spread, form):
        return f"{value:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")

    for name, r in rows.items():
        gap = name != baseline and r["difference"] is not None
        cells = [f"`{name}`", str(len(r["seeds"])), f"{r['tokens']:,}", cell(r["loss"], r["loss_sd"], ".4f"),
                 cell(r["difference"], r["difference_95"], "+.4f") if gap else "-",
                 cell(r["tok_s"], r["tok_s_sd"], ",.0f"),
                 "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2 ** 30:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
