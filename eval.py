"""Loss, perplexity and bits per byte on a validation split:   python eval.py runs/gpt-tiny runs/satformer-tiny"""
import argparse
import json
import sys
from pathlib import Path

import torch

import data_prep
import models


def evaluate(run, args):
    """One row of the table: a dict. ValueError with one line for a run or data that cannot be used."""
    device = models.find_device(args.device)
    model, config = models.load(run, device)
    opt, trained = config["options"], config["data"]
    data = data_prep.Data(args.data or trained["path"])
    if not args.data and data.fingerprint != trained["fingerprint"]:
        raise ValueError(f"{trained['path']} is not what {run} was trained on any more: name the data with --data")
    own, other = Path(run) / "tokenizer.tiktoken", Path(data.tokenizer)     # files, unless the tokenizer is gpt2 or byte
    same = own.read_bytes() == other.read_bytes() if own.exists() and other.is_file() else data.tokenizer == config["tokenizer"]
    if not same or data.vocab_size > model.config.vocab_size:
        raise ValueError(f"{data.path} has other tokens ({data.tokenizer}) than {run} was trained on ({config['tokenizer']})")
    seq_len = args.seq_len or opt["seq_len"]
    if seq_len > model.config.max_len:
        raise ValueError(f"--seq_len {seq_len} is longer than max_len {model.config.max_len} of {run}")
    batch = max(1, args.batch_tokens // seq_len)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=opt["dtype"] == "bf16")
    row = models.evaluate(model, data.val_batches(args.tokens, batch, seq_len), data.token_bytes, autocast)
    n_params, step = sum(p.numel() for p in model.parameters()), models.read_checkpoint(run)["step"]
    return {"run": run, "model": config["model"], "step": step, "parameters": n_params, "data": str(data.path),
            "fingerprint": data.fingerprint, "seq_len": seq_len, **row}


def main():
    parser = models.Parser("eval.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders of train.py")
    parser.add_argument("--data", help="data folder; none: the one the run was trained on")
    parser.add_argument("--tokens", type=int, help="only the first so many tokens of the validation split; none: all")
    parser.add_argument("--seq_len", type=int, help="tokens per window; none: as in training")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens per forward pass")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args()
    if min(args.batch_tokens, args.tokens or 1, args.seq_len or 1) < 1 or 0 in (args.tokens, args.seq_len):
        parser.error("--batch_tokens, --tokens and --seq_len must be at least 1")
    try:
        rows = [evaluate(run, args) for run in args.runs]
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    except (ValueError, OSError) as e:
        parser.error(models.one_line(e))
    width = max(len(row["run"]) for row in rows)
    print(f"{'run':{width}}  {'step':>7}  {'parameters':>13}  {'tokens':>11}  {'loss':>7}  {'ppl':>9}  {'bits/byte':>9}")
    for row in rows:
        bpb = "-" if row["bpb"] is None else f"{row['bpb']:.4f}"
        print(f"{row['run']:{width}}  {row['step']:7,}  {row['parameters']:13,}  {row['eval_tokens']:11,}  {row['loss']:7.4f}  "
              f"{row['ppl']:9.3f}  {bpb:>9}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
