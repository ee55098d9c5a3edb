"""Groups runs into systems, and compares the systems' losses. The runs of one system differ only in their seed."""
import json
import math
from pathlib import Path
from statistics import mean, median, mode, stdev

import models
from nanodepth import ran
from nanodepth.cli import UserError, one_line
from nanodepth.runs import log_rows

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
       2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
       2.042)  # 97.5% quantiles of Student's t for 1 .. 30 degrees of freedom


# -------------------------------------------------------------------------------------------------------- runs, systems


def read_log(run):
    """{"run", "config", "seed", "train": rows, "val": rows, "done"} of a run folder, from config.json and log.jsonl.

    A loss that was not finite is null in the log and nan here. UserError for a folder that is not a run, and for a run
    with fewer than two validations.
    """
    try:
        config = json.loads((Path(run) / "config.json").read_text(encoding="utf-8"))
        found = {"run": str(run), "config": config, "seed": config["options"]["seed"]}
        validated_on(found), ran.what(config)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{run} is not the folder of a run with a readable config.json: {one_line(e)}") from None
    rows = log_rows(Path(run) / "log.jsonl", math.inf)
    found["train"] = [row for row in rows if row["kind"] == "train"]
    found["val"] = [{"eval_tokens": config["options"]["eval_tokens"], **row,
                     "loss": math.nan if row["loss"] is None else row["loss"]} for row in rows if row["kind"] == "val"]
    if len(found["val"]) < 2 or not found["train"]:
        raise UserError(f"{run} has only one validation: it has just begun, or was stopped")
    found["done"] = found["val"][-1]["step"] >= config["options"]["max_steps"]
    return found


def validated_on(run):
    """What a run's losses are measured on, in words: sequence length, data."""
    options = run["config"]["options"]
    return f"sequences of {options['seq_len']:,} of data with fingerprint {run['config']['data']['fingerprint']}"


def same_tokens(runs):
    """Keeps the validations that scored as many tokens as most did, and the last ones if these are equal -> [text]:
    what was left out, in words.
    """
    usual = mode(row["eval_tokens"] for run in runs for row in run["val"])
    finals = [run["val"][-1]["eval_tokens"] for run in runs if run["done"]]
    final, messages = mode(finals) if finals else usual, []
    for run in runs:
        kept = [row for row in run["val"] if row["eval_tokens"] == usual
                or row is run["val"][-1] and run["done"] and row["eval_tokens"] == final]
        if gone := sorted({(row["eval_tokens"], row["step"]) for row in run["val"] if row not in kept}):
            messages.append(f"{run['run']}: its losses on other tokens than most ({usual:,}, at the end {final:,}): "
                            + ", ".join(f"{tokens:,} at step {step}" for tokens, step in gone))
        run["val"] = kept
    return messages


def systems(runs, ignore=()):
    """{name: its runs}. The runs of a system differ in their seed alone; ignore: see ran.differences().

    It has the name of its model and, if that has several systems, of what differs between these: options (unless they
    have their default), and if only code differs the number of parameters, or the date.
    """
    groups = []
    for run in runs:
        own = [some for some in groups if not ran.differences(some[0]["config"], run["config"], ignore)]
        own[0].append(run) if own else groups.append([run])
    found = {}
    for some in groups:
        config, others = some[0]["config"], [each[0]["config"] for each in groups if each is not some]
        rivals = [other for other in others if other["model"] == config["model"]]
        differ = {name: pair[0] for other in rivals for name, pair in ran.differences(config, other, ignore).items()}
        words = [f"{name}={differ[name]}" for name in {**ran.what(config), **differ} if name in differ
                 and not name.endswith(".py") and (name not in config["model_config"]
                                                   or config.get("defaults", {}).get(name, config) != differ[name])]
        twins = [other for other in rivals if all(name.endswith(".py") for name in
                                                  ran.differences(config, other, ignore))]
        if twins:
            count = config.get("parameters")
            words += [f"{count:,} parameters" if count not in [other.get("parameters") for other in twins] else
                      f"of {config.get('began', 'an unknown day')}"]
        name = " ".join([config["model"], *words])
        found[f"{name} ({len(found)})" if name in found else name] = some
    return found


def otherwise(systems, name, base, ignore=()):
    """How two systems differ besides the idea (the model, its file, options that only one of them has) and what their
    names say, in words.
    """
    a, b = (systems[each][0]["config"] for each in (name, base))
    own = {"model", *(a["model_config"].keys() ^ b["model_config"].keys())}
    found = {key: pair for key, pair in ran.differences(a, b, {*ignore, *own}).items()
             if f" {key}=" not in name + base and (a["model"] == b["model"] or not key.startswith("models/"))}
    return ran.in_words(found)


def find_baseline(groups):
    """The name of the baseline: a system of the registry's first model, gpt, or any system if gpt is missing.

    Of several, the one that ends after as many tokens as most systems do, with the fewest options in its name.
    """
    plain = [name for name in groups if name.split()[0] == models.names()[0]]
    ends = [end(some)[0] for some in groups.values()]
    return max(plain or groups, key=lambda name: (ends.count(end(groups[name])[0]), -len(name.split())))


# ---------------------------------------------------------------------------------------------------- curves, intervals


def curve(some):
    """[(tokens, mean loss over the seeds)] at the validations that all seeds have, on as many tokens."""
    usual = mode(row["eval_tokens"] for run in some for row in run["val"])
    at = [{row["tokens"]: row["loss"] for row in run["val"] if row["eval_tokens"] == usual} for run in some]
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


def usable(systems):
    """({name: its runs whose final losses can be averaged}, [text]: which runs cannot, and why).

    Of runs of one seed that is the newest; none that diverged or has not finished, if others of its system have.
    """
    kept, messages = {}, []
    for name, some in systems.items():
        seeds = {}
        for run in sorted(some, key=lambda run: (Path(run["run"]) / "log.jsonl").stat().st_mtime_ns):
            if run["seed"] in seeds:
                messages.append(f"{seeds[run['seed']]['run']}: there is a newer run of the same system with the same "
                                f"seed, {run['run']}")
            seeds[run["seed"]] = run                                                    # the newest comes last
        good = [run for run in seeds.values() if run["done"] and math.isfinite(run["val"][-1]["loss"])]
        for run in seeds.values() if good else ():
            last = run["val"][-1]
            if run not in good:
                why = (f"stopped at step {last['step']} of {run['config']['options']['max_steps']}"
                       if math.isfinite(last["loss"]) else f"diverged: its loss at step {last['step']} is not finite")
                messages.append(f"{run['run']}: {why}, other runs of {name} have finished")
        kept[name] = good or list(seeds.values())
    return kept, messages


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
