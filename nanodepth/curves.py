"""From the logs of runs to systems, intervals and tables. Runs that differ in their seed alone are one system."""
import json
import math
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, mode, stdev

import models
from nanodepth.cli import UserError, one_line

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
       2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
       2.042)  # 97.5% quantiles of Student's t for 1 .. 30 degrees of freedom


# -------------------------------------------------------------------------------------------------------- runs, systems


def read_log(run):
    """{"run", "config", "seed", "train", "val"} of a run folder, from its config.json and log.jsonl.

    train: rows with tok_s; val: rows with tokens and loss; a row also has those of tokens, loss, eval_tokens and
    peak_bytes that were logged. UserError for a folder without them, or with fewer than two validations.
    """
    try:
        config = json.loads((Path(run) / "config.json").read_text())
        lines = (Path(run) / "log.jsonl").read_text().splitlines()
        options = config["options"]
        numbers = [options["seed"], options["seq_len"], options["eval_tokens"], options.get("final_eval_tokens") or 0]
        texts = [config["model"], config["data"]["fingerprint"]]
        if not (all(isinstance(x, (int, float)) for x in numbers) and all(isinstance(x, str) for x in texts)
                and isinstance(config["model_config"], dict)):
            raise TypeError("config.json has other types than train.py writes")
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{run} is not the folder of a run with a good config.json and log.jsonl: "
                        f"{one_line(e)}") from None
    rows = {"train": [], "val": []}
    for line in lines:
        try:
            row = json.loads(line)
            needed = {"train": ("tok_s",), "val": ("tokens", "loss")}[row["kind"]]
            more = {"tokens", "loss", "eval_tokens", "peak_bytes"} & set(row) - set(needed)
            rows[row["kind"]].append({key: row[key] + 0 for key in (*needed, *more)})
        except (ValueError, KeyError, TypeError):
            if line is not lines[-1]:                                       # the last may be cut off
                raise UserError(f"{run}/log.jsonl has a line that is not train.py's: {line[:80]!r}") from None
    if len(rows["val"]) < 2 or not rows["train"]:
        raise UserError(f"{run} has not reached its second validation yet")
    return {"run": str(run), "config": config, "seed": options["seed"], **rows}


def validated_on(run):
    """(fingerprint of the data, tokens of a sequence, of a validation, of the last one): runs with equal ones can be
    compared."""
    data, options = run["config"]["data"], run["config"]["options"]
    final = options.get("final_eval_tokens") or options["eval_tokens"]      # an older run lacks newer options
    return data["fingerprint"], options["seq_len"], options["eval_tokens"], final


def comparable(runs):
    """[(heading, runs that were validated on the same tokens)], the largest group first.

    A heading has the data's path and the sequence length, and what else tells the group from another.
    """
    groups = {}
    for run in runs:
        groups.setdefault(validated_on(run), []).append(run)
    paths = {key: str(some[0]["config"]["data"].get("path")) for key, some in groups.items()}

    def heading(key):
        fingerprint, seq_len, tokens, final = key
        parts = [paths[key], f"sequences of {seq_len:,} tokens"]
        if len({other[2:] for other in groups}) > 1:
            parts.append(f"eval_tokens {tokens:,}" + (f" ({final:,} at the end)" if final != tokens else ""))
        if any(paths[other] == paths[key] and other[0] != fingerprint for other in groups):
            parts.append(f"fingerprint {fingerprint[:8]}")
        return ", ".join(parts)

    return [(heading(key), some) for key, some in sorted(groups.items(), key=lambda group: -len(group[1]))]


def newest(runs):
    """(runs without repeats, [(a run left out, the one that stands for it)]): of several runs of one system, on
    the same tokens with one seed, the one with the newest log counts."""
    kept, older = {}, []
    for run in sorted(runs, key=lambda run: (Path(run["run"]) / "log.jsonl").stat().st_mtime_ns):
        key = json.dumps([identity(run), validated_on(run), run["seed"]], sort_keys=True)
        if key in kept:
            older.append((kept[key], key))
        kept[key] = run
    stays = {run["run"] for run in kept.values()}
    return [run for run in runs if run["run"] in stays], [(run["run"], kept[key]["run"]) for run, key in older]


def identity(run):
    """{name: value} of what makes a run's system: model, options and GPU, without the seed and what changes no loss."""
    hidden = {"seed", "out", "resume", "device", "compile", "deterministic", "micro_batch", "save_every", "wandb",
              "tensorboard", "sample_every", "threads", "data", "model", "preset", "eval_every"}
    c = run["config"]
    options = {"final_lr_frac": 0.1, **c["options"]}                        # an older run lacks newer options
    options = {name: value for name, value in options.items() if name not in hidden and value is not None}
    structure = defaults(c["model"], c["model_config"]) | c["model_config"]
    return {"model": c["model"], **structure, **options, "gpu": c.get("gpu")}


def systems(runs):
    """{label: [runs that differ only in the seed]}, labelled by the model and the options in which the systems differ.

    UserError if a system has two runs with the same seed.
    """
    groups = {}
    for run in runs:
        key = identity(run)
        _, seeds = groups.setdefault(json.dumps(key, sort_keys=True), (key, {}))
        if run["seed"] in seeds:
            raise UserError(f"{seeds[run['seed']]['run']} and {run['run']} are the same system with the same seed: "
                            "leave one out")
        seeds[run["seed"]] = run
    found = {}
    for key, seeds in groups.values():
        name = label(key, list(seeds.values()), groups)
        found[name if name not in found else f"{name} ({len(found) + 1})"] = list(seeds.values())
    return found


def label(key, some, groups):
    """Name of the system of the runs `some` with the options `key`, by what tells it from the model's other systems,
    and by its length where lengths differ."""
    same = [other for other, _ in groups.values() if other["model"] == key["model"]]
    shown = [name for name in key if any(other.get(name) != key[name] for other in same)]
    structure = some[0]["config"]["model_config"]
    structural = [name for name in shown if name in structure]
    apart = {json.dumps([other.get(name) for name in structural]) for other in same}
    if len(apart) == len(same):                                     # the model's own options are enough
        usual = defaults(key["model"], {name: value for name, value in structure.items() if name not in shown})
        shown = [name for name in structural if key[name] != usual.get(name)]
    if len({other.get("max_steps") for other, _ in groups.values()}) > 1:       # of all models
        shown = [*(name for name in shown if name != "max_steps"), *({"max_steps"} & set(key))]
    return " ".join([key["model"], *(f"{name}={key[name]}" for name in shown)])


def defaults(name, given):
    """The values of a model's Config with the given ones, of which it may lack some; {} if its file is gone or has
    changed too much."""
    try:
        config = models.module(name).Config
        return vars(config(**{f.name: given[f.name] for f in fields(config) if f.name in given}))
    except (ValueError, TypeError):
        return {}


def find_baseline(groups):
    """Label of the system that the others are compared with: the registry's first model, else the first.

    Of several such systems the one that ends after as many tokens as most others do, so that differences can be taken.
    """
    root = models.names()[0]
    plain = [name for name in groups if name.split()[0] == root]
    if root in groups:
        return root
    ends = {name: end(some)[0] for name, some in groups.items()}
    return max(plain or groups, key=lambda name: list(ends.values()).count(ends[name]))


# ---------------------------------------------------------------------------------------------------- curves, intervals


def curve(some):
    """Mean over the seeds of the validation losses at the steps that all of them have: [(tokens, loss)].

    Without those on more or fewer tokens than most are, such as the last one of a run with final_eval_tokens.
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


def training(some, base=None):
    """Mean over the seeds of the training losses, as a running mean over a tenth of the rows: [(tokens, loss)].

    What is optimised, penalties included; with `base` minus what its run with the same seed has. [] without such rows.
    """
    def losses(run):
        return {row["tokens"]: row["loss"] for row in run["train"] if {"tokens", "loss"} <= set(row)}

    at = {run["seed"]: losses(run) for run in some}
    if base is not None:
        others = {run["seed"]: losses(run) for run in base}
        at = {seed: {tokens: loss - others[seed][tokens] for tokens, loss in rows.items() if tokens in others[seed]}
              for seed, rows in at.items() if seed in others}
    common = sorted(set.intersection(*map(set, at.values()))) if at else []
    n = max(1, len(common) // 10)
    windows = (common[i:i + n] for i in range(len(common) - n + 1))
    return [(mean(window), mean(rows[tokens] for tokens in window for rows in at.values())) for window in windows]


def crossing(points, level):
    """Where a curve [(x, y)] first comes down to a level, on straight lines between its points; None if it does not."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= level < y0:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None


def gaps(some, base, tokens):
    """Losses after so many tokens minus those of the run in `base` with the same seed, hence the same batches; of runs
    that were validated on equally many tokens there."""
    at = [{(run["seed"], row.get("eval_tokens")): row["loss"] for run in group for row in run["val"]
           if row["tokens"] == tokens} for group in (some, base)]
    return [at[0][key] - at[1][key] for key in at[0] if key in at[1]]


def interval(values):
    """(mean, half of its 95% interval by Student's t) of a sample; None for what it is too small for."""
    if len(values) < 2:
        return (values[0] if values else None), None
    return mean(values), t95(len(values) - 1) * deviation(values) / math.sqrt(len(values))


def deviation(values):
    """Standard deviation; nan where a value is not finite, on which statistics.stdev fails."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def t95(degrees):
    """The 97.5% quantile of Student's t; above 30 degrees of freedom by a formula, within 0.003."""
    return T95[degrees - 1] if degrees <= len(T95) else 1.96 + 2.4 / degrees


# --------------------------------------------------------------------------------------------------------- tokens saved


def tokens_needed(ends, loss):
    """Tokens that a baseline needs to end with this loss; None outside of what was measured.

    ends: [(tokens, final loss)] of baseline runs of several lengths, each with a whole schedule of its own. Between
    two lengths the loss is a straight line over log(tokens); where noise makes the curve rise, the first of several
    answers counts.
    """
    points = [(math.log(tokens), y) for tokens, y in sorted(ends) if math.isfinite(y)]
    if points and points[0][1] == loss:
        return math.exp(points[0][0])
    at = crossing(points, loss)
    return None if at is None else math.exp(at)


# --------------------------------------------------------------------------------------------------------------- tables


def summarise(groups, baseline):
    """{label: row of the table} of systems()'s groups, the baseline first; as of the last validation all seeds have."""
    rows, level = {}, end(groups[baseline])
    alike = level == curve(groups[baseline])[-1]                            # a point of its curve
    for name, some in {baseline: groups[baseline], **groups}.items():
        points, (tokens, loss) = curve(some), end(some)
        ends = [row["loss"] for run in some for row in run["val"] if row["tokens"] == tokens]
        comparable = tokens == level[0]
        gap, half = interval(gaps(some, groups[baseline], level[0])) if comparable else (None, None)
        peaks = [max(row.get("peak_bytes", 0) for row in run["val"]) for run in some]
        speeds = [median(row["tok_s"] for row in run["train"]) for run in some]
        reached = None
        if alike:
            reached = level[0] if name == baseline else crossing(points, level[1])
        rows[name] = {
            "runs": [run["run"] for run in some], "seeds": [run["seed"] for run in some], "tokens": tokens,
            "loss": loss, "loss_sd": deviation(ends) if len(ends) > 1 else None,
            "difference": gap, "difference_95": half,
            "tokens_to_baseline": reached,
            "tok_s": mean(speeds), "tok_s_sd": deviation(speeds) if len(speeds) > 1 else None,
            "peak_bytes": mean(peaks) if min(peaks) else None, "curve": points}
    return rows


def table(rows, baseline):
    """The rows of summarise() as Markdown."""
    lines = [f"| system | seeds | tokens | final loss (nats) | difference to {baseline} (95% interval) "
             f"| tokens to reach {baseline}'s final loss | tokens/s | peak GiB |", "|---|---|---|---|---|---|---|---|"]

    def with_spread(value, spread, form):
        return format(value, form) + ("" if spread is None else f" ± {format(spread, form.lstrip('+'))}")

    for name, r in rows.items():
        unknown = name == baseline or rows[baseline]["tokens_to_baseline"] is None
        gap, reached = "-", "-" if unknown else "not reached"
        if r["difference"] is not None and name != baseline:
            gap = with_spread(r["difference"], r["difference_95"], "+.4f")
        if name != baseline and r["tokens_to_baseline"] is not None:
            times = rows[baseline]["tokens"] / r["tokens_to_baseline"]
            reached = f"{r['tokens_to_baseline'] / 1e6:,.2f}M" + (f" ({times:.2f}x fewer)" if times >= 1 else "")
        cells = [f"`{name}`", str(len(r["seeds"])), f"{r['tokens'] / 1e6:,.2f}M",
                 with_spread(r["loss"], r["loss_sd"], ".4f"), gap, reached,
                 with_spread(r["tok_s"], r["tok_s_sd"], ",.0f"),
                 "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2 ** 30:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
