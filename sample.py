"""Samples text from a trained model and prints it as it comes:

    python sample.py runs/gpt-tiny --prompt "import os"
    python sample.py runs/gpt-tiny --file draft.py --top_p 0.9
"""
import argparse
import os
import sys
from pathlib import Path

import torch

import models
import nanodepth
from nanodepth.cli import Parser, UserError, run_folder, run_script
from nanodepth.devices import autocast, find_device


def parse(argv):
    parser = Parser("sample.py", description=__doc__)
    parser.add_argument("run", type=run_folder, help="run folder of train.py or convert.py")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document")
    parser.add_argument("--file", type=Path, help="file with the text to continue, instead of --prompt")
    parser.add_argument("--n", type=int, default=1, help="number of samples, generated as one batch [%(default)s]")
    parser.add_argument("--max_new_tokens", type=int, metavar="N",
                        help="tokens per sample [256, at most half of max_len]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X",
                        help="0: always the likeliest token [%(default)s]")
    parser.add_argument("--top_k", type=int, metavar="N", help="sample only among the N likeliest tokens")
    parser.add_argument("--top_p", type=float, metavar="X",
                        help="sample only among the likeliest tokens whose probabilities add up to X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling [%(default)s]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False,
                        help="compile the decoding step: worth it for long texts")
    args = parser.parse_args(argv)
    for name, least in dict(n=1, max_new_tokens=1, top_k=1, temperature=0, seed=0).items():
        value = getattr(args, name)
        if value is not None and not least <= value < 2 ** 63:
            parser.error(f"--{name} must be at least {least} and finite, not {value}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p must lie above 0 and be at most 1, not {args.top_p}")
    if args.file and args.prompt:
        parser.error("--prompt and --file are two prompts: give only one")
    return args


def read_prompt(args, tokenizer, room):
    """The tokens of the prompt, the last `room` of a longer one. UserError for a file that is missing, or not UTF-8."""
    try:                                                        # as UTF-8, whatever the locale is
        text = (args.file.read_bytes() if args.file else os.fsencode(args.prompt)).decode("utf-8-sig")
    except (OSError, UnicodeError) as e:
        raise UserError(f"{args.file or '--prompt'}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None
    tokens = tokenizer.encode_ordinary(text)
    if len(tokens) > room:
        print(f"sample.py: only the last {room:,} of the prompt's {len(tokens):,} tokens fit: the model's max_len must "
              f"also hold the {args.max_new_tokens} new ones", file=sys.stderr)
    return tokens[max(0, len(tokens) - room):]


def cast_weights(model, dtype):
    """Casts the matrices of a model to bf16, if that is the dtype: once, and not for every token, as autocast does."""
    for part in model.modules() if dtype == "bf16" else ():
        if isinstance(part, (torch.nn.Linear, torch.nn.Embedding)):
            part.weight.data = part.weight.data.bfloat16()


def main(argv):
    args = parse(argv)
    device = find_device(args.device)
    model, tokenizer, config = nanodepth.load(args.run, device)
    if not hasattr(model, "generate"):
        raise UserError(f"{models.path(config['model'])} has no Model.generate to sample text with: see gpt.py")
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"{args.run}: its weights are not finite")
    dtype, max_len = config["options"]["dtype"], model.config.max_len
    cast_weights(model, dtype)
    args.max_new_tokens = args.max_new_tokens or min(256, max(1, max_len // 2))
    eot = tokenizer.eot_token                                               # begins and ends a text
    if args.max_new_tokens >= max_len:
        raise UserError(f"--max_new_tokens {args.max_new_tokens}: at most {max_len - 1} fit in max_len {max_len} of "
                        f"{args.run}")
    prompt = read_prompt(args, tokenizer, max_len - args.max_new_tokens - 1)

    def text_of(tokens):
        """The prompt and these tokens as text, up to the first end-of-text token."""
        end = next((i for i, t in enumerate(tokens) if t == eot), len(tokens))
        return tokenizer.decode([t for t in (*prompt, *tokens[:end]) if t < tokenizer.n_vocab])     # other ids: no text

    if args.compile:                                                        # but not for the prompt
        eager, compiled = model.forward, torch.compile(model.forward, fullgraph=True)
        model.forward = lambda idx, cache: (compiled if idx.size(1) == 1 else eager)(idx, cache=cache)
    torch.manual_seed(args.seed)
    idx = torch.tensor([[eot, *prompt]], device=device).repeat(args.n, 1)   # first: it may not fit in memory
    samples, shown = [[] for _ in range(args.n)], 0
    with autocast(device, dtype):
        for new in model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                  config.get("n_vocab")):
            for tokens, (token,) in zip(samples, new.tolist()):
                tokens.append(token)
            text = text_of(samples[0]) if args.n == 1 else ""
            if not text.endswith("\ufffd"):                                 # half a character
                print(text[shown:], end="", flush=True)
                shown = len(text)
            if all(eot in tokens for tokens in samples):
                break
    for i, tokens in enumerate(samples):
        print(text_of(tokens)[shown:] if args.n == 1 else f"--- {i + 1}\n{text_of(tokens)}")
    if args.n == 1 and tokens[-1] == eot:
        print(f"sample.py: the model ended the text after {len(tokens) - 1} tokens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_script("sample.py", main, "lower --n, or take --device cpu")
