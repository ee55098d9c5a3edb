"""Loss, perplexity and bits per byte on a validation split, and the papers' benchmarks through lm_eval:

    python eval.py runs/gpt-tiny runs/satformer-tiny               the validation split of the data they were trained on
    python eval.py runs/A runs/B --tasks exo                       a table of ExoFormer's paper; also: sat, mudd, recall
    python eval.py runs/A --tasks arc_easy,piqa --num_fewshot 5    any tasks of lm_eval (pip install lm_eval)
    python eval.py runs/A --tasks arc_easy --task_dir DIR          your own task files, no network needed

End-of-text tokens count in loss and perplexity, but not in bits per byte.
"""
import os
import time
from pathlib import Path

from nanodepth import runs, scoring
from nanodepth.benchmarks import GROUPS, HarnessLM, benchmarks, find_tasks, lm_eval
from nanodepth.cli import Parser, UserError, out_file, progress, run_folder, run_script
from nanodepth.data import run_data
from nanodepth.devices import autocast, find_device


def parse(argv):
    parser = Parser("eval.py", description=__doc__)
    parser.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="run folders of train.py or convert.py")
    parser.add_argument("--data", help="data folder, or its name under data/; none: the data the run was trained on")
    parser.add_argument("--tokens", type=int, help="how many validation tokens to score, from the start; none: all")
    parser.add_argument("--tasks", help="instead of the validation split, comma-separated tasks: "
                                        f"{', '.join(GROUPS)}, tasks of lm_eval")
    parser.add_argument("--num_fewshot", type=int,
                        help="examples before each question, unless the task fixes 0; none: the paper's or the task's")
    parser.add_argument("--task_dir", metavar="DIR", help="take tasks only from the lm_eval task files in this folder")
    parser.add_argument("--limit", type=int, help="only the first LIMIT items of each lm_eval task, for a quick try")
    parser.add_argument("--seq_len", type=int,
                        help="longest input in tokens; none: as in training, for tasks max_len (recall: at most 2048)")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens per forward pass (%(default)s)")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value is not None}
    for name in given & {"batch_tokens", "tokens", "seq_len", "limit", "num_fewshot"}:
        if getattr(args, name) < (name != "num_fewshot"):
            parser.error(f"--{name} must be at least {int(name != 'num_fewshot')}")
    if args.tasks is None:
        unused, how = {"num_fewshot", "limit", "task_dir"}, "without --tasks"
    else:
        unused, how = {"data", "tokens"}, f"with --tasks {args.tasks}"
    if wrong := sorted(given & unused):
        parser.error(f"--{' and --'.join(wrong)} cannot be used {how}")
    return args


def score(run, args):
    """Scores a run on a validation split: one row of the table, a dict. UserError if run or data cannot be used."""
    device = find_device(args.device)
    model, config = runs.load(run, device)
    data, seq_len = run_data(run, config, args.data), args.seq_len or config["options"]["seq_len"]
    if seq_len > model.config.max_len:
        raise UserError(f"--seq_len {seq_len} is longer than max_len {model.config.max_len} of {run}")
    rows = min(args.batch_tokens, args.tokens or data.n_val) // seq_len         # a batch is padded to its full size
    batches = data.val_batches(args.tokens, max(1, rows), seq_len)
    batches = progress(batches, run, unit=" batches")
    row = scoring.evaluate(model, batches, data.token_bytes, autocast(device, config["options"]["dtype"]))
    return {"run": run, "model": config["model"], "step": config["step"],
            "parameters": sum(p.numel() for p in model.parameters()), "data": str(data.path),
            "fingerprint": data.fingerprint, "seq_len": seq_len, **row}


def on_split(args):
    """Scores every run on its validation split; prints a table and returns its rows."""
    rows = [score(run, args) for run in args.runs]
    cells = [("run", "step", "parameters", "data", "seq_len", "tokens", "loss", "ppl", "bytes of text", "bits/byte")]
    for row in rows:
        text = ("-", "-") if row["bpb"] is None else (f"{row['eval_bytes']:,}", f"{row['bpb']:.4f}")
        cells.append((row["run"], f"{row['step']:,}", f"{row['parameters']:,}", row["data"], f"{row['seq_len']:,}",
                      f"{row['eval_tokens']:,}", f"{row['loss']:.4f}", f"{row['ppl']:.3f}", *text))
    print_table(cells)
    return rows


def on_tasks(args):
    """Benchmarks every run; prints tables, appends to each run's eval.jsonl and returns the new rows."""
    asked = find_tasks(list(dict.fromkeys(args.tasks.split(","))), args.task_dir)
    for run in args.runs:                                                   # fail before hours of work
        if not os.access(run, os.W_OK):
            raise UserError(f"{run}: eval.jsonl cannot be written there: copy the run to a writable folder")
    rows = []
    for run in args.runs:
        lm = HarnessLM(run, args.device, args.batch_tokens, args.seq_len)
        longest, tables = lm.seq_len, benchmarks(lm, args, *asked)
        rows.append({"run": run, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "step": lm.step,
                     "lm_eval": lm_eval.__version__, "limit": args.limit, "seq_len": longest, "tables": tables})
        with open(Path(run) / "eval.jsonl", "a", encoding="utf-8") as f:
            f.write(runs.to_json(rows[-1]))
    for title in rows[0]["tables"]:
        tables = [row["tables"][title] for row in rows]
        shots = [found["shots"] for found in tables[0].values()]
        print_table([(title, *tables[0]), ("shots", *("-" if n is None else str(n) for n in shots)),
                     *((run, *map(cell, table.values())) for run, table in zip(args.runs, tables))])
    return rows


def cell(found):
    """{"value", "stderr"} as text. A value may lack its standard error."""
    return f"{found['value']:.2f}" + ("" if found["stderr"] is None else f" ±{found['stderr']:.2f}")


def print_table(rows):
    """Prints rows of strings, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *texts in rows:
        print("  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(texts, widths[1:]))]))


def main(argv):
    args = parse(argv)
    for run in args.runs:
        runs.read_checkpoint(run)                                           # fail before the work
    rows = on_split(args) if args.tasks is None else on_tasks(args)
    if args.json:
        args.json.write_text(runs.to_json(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script("eval.py", main, "lower --batch_tokens")
