"""Text from a trained model:   python sample.py runs/gpt-tiny --prompt "import os" """
import argparse
import sys

import torch

import nanodepth
from nanodepth.devices import autocast, cast_weights, find_device, out_of_memory
from nanodepth.options import Parser, UserError, exit_code, user_errors


def parse(argv):
    parser = Parser("sample.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", help="run folder of train.py")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a document")
    parser.add_argument("--n", type=int, default=1, help="number of samples")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="length of each")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--compile", action="store_true", help="compile the decoding step: pays for long texts")
    args = parser.parse_args(argv)
    if min(args.n, args.max_new_tokens, 1 if args.top_k is None else args.top_k) < 1:
        parser.error("--n, --max_new_tokens and --top_k must be at least 1")
    if not 0 <= args.temperature < float("inf") or not 0 <= args.seed < 2 ** 63:
        parser.error("--temperature and --seed must be at least 0, and finite")
    return args


def main(argv):
    args = parse(argv)
    device = find_device(args.device)
    model, tokenizer, config = nanodepth.load(args.run, device)
    dtype = config["options"]["dtype"]
    cast_weights(model, dtype)
    prompt = [tokenizer.eot_token, *tokenizer.encode_ordinary(args.prompt)]         # documents start with end-of-text
    generator = torch.Generator(device).manual_seed(args.seed)
    try:
        idx = torch.tensor([prompt] * args.n, device=device)
        with user_errors(), autocast(device, dtype):
            out = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, generator, args.compile)
    except (RuntimeError, MemoryError, OverflowError) as e:
        if "probability tensor" in str(e):
            raise UserError(f"{args.run} gives no probabilities: its weights are not finite") from None
        if not out_of_memory(e) and not isinstance(e, OverflowError):
            raise
        raise UserError("out of memory: lower --n") from None
    for i, row in enumerate(out[:, 1:].tolist()):
        end = next((at for at in range(len(prompt) - 1, len(row)) if row[at] == tokenizer.eot_token), len(row))
        text = tokenizer.decode([t for t in row[:end] if t < tokenizer.n_vocab])    # untrained: any id of the model
        print(text if args.n == 1 else f"--- {i + 1}\n{text}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, KeyboardInterrupt) as e:
        sys.exit(exit_code("sample.py", e))
