"""Groups runs into systems, and compares the systems' losses. The runs of one system differ only in their seed.

The 95% intervals come from one mean per system and one per seed (a randomised block design), because a seed fixes the
batches. All systems share one standard deviation, because a few seeds say little about the noise of one system.
"""
import json
import math
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np

import models
from nanodepth import ran
from nanodepth.cli import UserError, one_line
from nanodepth.runs import log_rows

BATCHES = {"data", "batch_tokens", "seq_len", "nanodepth/data.py"}         # what decides the batches beside the seed
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


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


def systems(runs, ignore=()):
    """{name: its runs}. The runs of a system differ in their seed alone; ignore: see ran.differences().

    It has the name of its model and, if that has several systems, of what differs between these: options (unless they
    have their default), and if only code differs when its first run began.
    """
    groups = []
    for run in runs:
        own = [some for some in groups if not ran.differences(some[0]["config"], run["config"], ignore)]
        own[0].append(run) if own else groups.append([run])
    found = {}
    for some in groups:
        config = some[0]["config"]
        rivals = [ran.differences(config, each[0]["config"], ignore) for each in groups
                  if each is not some and each[0]["config"]["model"] == config["model"]]
        differ = {name: pair[0] for pairs in rivals for name, pair in pairs.items()}
        words = [f"{name}={differ[name]}" for name in {**ran.what(config), **differ} if name in differ
                 and not name.endswith(".py") and (name not in config["model_config"]
                                                   or config.get("defaults", {}).get(name, config) != differ[name])]
        if any(all(name.endswith(".py") for name in pairs) for pairs in rivals):
            words.append(f"of {config.get('began', 'an unknown day')}")
        name = " ".join([config["model"], *words])
        found[f"{name} ({len(found)})" if name in found else name] = some
    return found


def otherwise(systems, name, base, ignore=()):
    """How two systems differ besides the idea (the model, its files, options that only it has) and what their names
    say, in words.
    """
    a, b = (systems[each][0]["config"] for each in (name, base))
    code, other = a.get("code", {}), b.get("code", {})
    own, said = (), any                                 # the name of one of them says it; of two models, both names
    if a["model"] != b["model"]:
        shared = {*ran.DECIDE, "muon.py", *[*code][:1], *[*other][:1]}          # the first file is the script
        own = {"model", *(a["model_config"].keys() - b["model_config"].keys()),
               *((code.keys() ^ other.keys()) - shared)}
        said = all
    found = ran.differences(a, b, {*ignore, *own})
    return ran.in_words({key: x for key, x in found.items() if not said(f" {key}=" in each for each in (name, base))})


def elsewhere(some, base):
    """What differs between the machines and settings of two systems' runs that changes their speed or memory, in words
    (beside the compiler, which the table names).
    """
    names = "cpu", "gpu", "ranks", "threads", "micro_batch", "deterministic"
    a, b = ({name: {{**run["config"], **run["config"]["options"]}.get(name) for run in runs} for name in names}
            for runs in (some, base))
    return ", ".join(name for name in names if a[name] != b[name])


def find_baseline(groups):
    """The name of the baseline: a system of the registry's first model, gpt, or any system if gpt is missing.

    Of several, the one that ends after as many tokens as most systems do, with the fewest options in its name.
    """
    plain = [name for name in groups if name.split()[0] == models.names()[0]]
    ends = {name: curve(some)[-1][0] for name, some in groups.items()}
    return max(plain or groups, key=lambda name: (list(ends.values()).count(ends[name]), -len(name.split())))


def usable(systems):
    """({name: its runs whose final losses can be averaged}, [text]: which runs cannot, and why).

    Of runs of one seed that is the newest that has finished; none that diverged or has not finished, if others of its
    system have.
    """
    def ended(run):
        return run["done"] and math.isfinite(run["val"][-1]["loss"])

    kept, messages = {}, []
    for name, some in systems.items():
        seeds = {}
        for run in sorted(some, key=lambda run: (ended(run), (Path(run["run"]) / "log.jsonl").stat().st_mtime_ns)):
            if run["seed"] in seeds:
                messages.append(f"{seeds[run['seed']]['run']}: {run['run']} is a newer or finished run of the same "
                                "system with the same seed")
            seeds[run["seed"]] = run                                                    # the one that counts comes last
        good = [run for run in seeds.values() if ended(run)]
        for run in seeds.values() if good else ():
            last = run["val"][-1]
            if run not in good:
                why = (f"stopped at step {last['step']} of {run['config']['options']['max_steps']}"
                       if math.isfinite(last["loss"]) else f"diverged: its loss at step {last['step']} is not finite")
                messages.append(f"{run['run']}: {why}, other runs of {name} have finished")
        kept[name] = good or list(seeds.values())
    return kept, messages


# ------------------------------------------------------------------------------------------------ curves, intervals


def curve(some):
    """[(tokens, mean loss over the seeds, validation tokens)] at the validations that all seeds have."""
    at = [{(row["tokens"], row["eval_tokens"]): row["loss"] for row in run["val"]} for run in some]
    common = sorted(set.intersection(*map(set, at)))
    if not common:
        raise UserError(f"{', '.join(run['run'] for run in some)}: no validations on as many tokens in common")
    return [(key[0], mean(rows[key] for rows in at), key[1]) for key in common]


def losses(groups, tokens, scored):
    """{system: {seed: finite loss}} after so many training tokens, on so many validation tokens."""
    found = {name: {run["seed"]: row["loss"] for run in some for row in run["val"] if math.isfinite(row["loss"])
                    and (row["tokens"], row["eval_tokens"]) == (tokens, scored)} for name, some in groups.items()}
    return {name: at for name, at in found.items() if at}


def other_batches(some, base):
    """Why runs of two systems do not see the same batches, in words; "" if runs of one seed do."""
    found = ran.differences(some[0]["config"], base[0]["config"])
    return ran.in_words({name: pair for name, pair in found.items() if name in BATCHES}) or (
        "" if {run["seed"] for run in some} & {run["seed"] for run in base} else "no seed in common")


def along(some, base, window):
    """[(tokens, difference, its standard error)] of the training losses of runs that see the same batches: means over
    `window` steps, and over the seeds. The batches' own spread cancels. A model's penalties (z_loss) are in its losses.
    """
    other = {run["seed"]: run["train"] for run in base}
    pairs = [[{row["step"]: row for row in rows} for rows in (run["train"], other[run["seed"]])] for run in some
             if run["seed"] in other and not other_batches([run], base)]
    steps = sorted(set.intersection(*(set(rows) for pair in pairs for rows in pair))) if pairs else []
    gaps = [(pairs[0][0][step]["tokens"], mean(a[step]["loss"] - b[step]["loss"] for a, b in pairs)) for step in steps]
    if len(gaps) < window:
        return []
    parts = np.lib.stride_tricks.sliding_window_view(np.array(gaps), window, 0)[::math.ceil(len(gaps) / 500)]
    errors = parts[:, 1].std(-1, ddof=1) / math.sqrt(window)
    return list(zip(parts[:, 0].mean(-1).tolist(), parts[:, 1].mean(-1).tolist(), errors.tolist()))


def difference(losses, a, b):
    """(a - b, half-width of its 95% interval); a and b: systems of {system: {seed: loss}}, or tuples of them, which are
    added up. The half-width is None if no run is left to tell the noise, both are if no seeds connect the systems.

    If all systems have the same seeds, a - b is the mean difference over the seeds. Seeds that only some systems have
    count as far as they say something about a and b.
    """
    plus, minus = ((x,) if isinstance(x, str) else x for x in (a, b))
    if not {*plus, *minus} <= losses.keys():
        return None, None
    rows = [(system, seed, loss) for system, at in losses.items() for seed, loss in at.items()]
    seeds, y = sorted({seed for _, seed, _ in rows}), np.array([loss for *_, loss in rows])
    X = np.array([[system == name for name in losses] + [seed == s for s in seeds] for system, seed, _ in rows], float)
    wanted, inverse = [plus.count(name) - minus.count(name) for name in losses] + [0] * len(seeds), np.linalg.pinv(X)
    weights = wanted @ inverse                                              # of each run in the difference
    if not np.allclose(weights @ X, wanted):
        return None, None
    rest, left = y - X @ (inverse @ y), len(y) - np.linalg.matrix_rank(X)
    half = t95(left) * math.sqrt(rest @ rest / left) * math.sqrt(weights @ weights) if left else None
    return float(weights @ y), half


def beside(groups, tokens, scored, *kept):
    """losses() of the systems that tell the noise of a difference: kept, and of those that differ only in their length
    the first. Longer runs begin as shorter ones do, so there they have no noise of their own.
    """
    found, chosen, begun = losses(groups, tokens, scored), {}, []
    for name in (*kept, *found):
        config = groups[name][0]["config"]
        key = {x: str(y).split(", from step")[0] for x, y in ran.what(config).items() if x != "max_steps"}
        if name in found and (name in kept or key not in begun):
            chosen[name] = found[name]
            begun.append(key)
    return chosen


def deviation(values):
    """Standard deviation; None of one value, nan if a value is not finite, for which statistics.stdev fails."""
    return (stdev(values) if all(map(math.isfinite, values)) else math.nan) if len(values) > 1 else None


def t95(degrees):
    """The 97.5% quantile of Student's t; above 30 degrees of freedom by a formula, within 0.003."""
    return T95[degrees - 1] if degrees <= len(T95) else 1.96 + 2.4 / degrees


# --------------------------------------------------------------------------------------------------------------- tables


def compiled(config):
    """Whether a run was "eager" or "compiled": without --compile it is on a GPU."""
    on = config["options"].get("compile")
    return "compiled" if (config.get("gpu") if on is None else on) else "eager"


def summarise(groups, baseline):
    """{name: row of the table} for systems(), the baseline first, at the last validation that all seeds have."""
    rows, end = {}, curve(groups[baseline])[-1]
    for name, some in {baseline: groups[baseline], **groups}.items():
        points = curve(some)
        tokens, loss, _ = points[-1]
        last = beside(groups, end[0], end[2], baseline, name)
        gap, half = difference(last, name, baseline) if tokens == end[0] else (None, None)
        peaks = [max(row.get("peak_bytes", 0) for row in run["val"]) for run in some]
        speeds = [median(row["tok_s"] for row in run["train"]) for run in some]
        rows[name] = {
            "runs": [run["run"] for run in some], "seeds": [run["seed"] for run in some], "tokens": tokens,
            "loss": loss, "loss_sd": deviation([row["loss"] for run in some for row in run["val"]
                                                if row["tokens"] == tokens]),
            "difference": gap, "difference_95": half, "tok_s": mean(speeds), "tok_s_sd": deviation(speeds),
            "mode": ", ".join(sorted({compiled(run["config"]) for run in some})),
            "peak_bytes": mean(peaks) if min(peaks) else None, "curve": points}
    return rows


def table(rows, baseline):
    """The rows of summarise() as Markdown."""
    lines = [f"| system | seeds | tokens | final loss (nats, ± SD) | difference to {baseline} (95% interval) "
             "| tokens/s | peak GiB |", "|---|---|---|---|---|---|---|"]

    def cell(value, spread, form):
        return f"{value:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")

    for name, r in rows.items():
        gap = name != baseline and r["difference"] is not None
        cells = [f"`{name}`", str(len(r["seeds"])), f"{r['tokens']:,}", cell(r["loss"], r["loss_sd"], ".4f"),
                 cell(r["difference"], r["difference_95"], "+.4f") if gap else "-",
                 f"{cell(r['tok_s'], r['tok_s_sd'], ',.0f')} {r['mode']}",
                 "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2 ** 30:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
