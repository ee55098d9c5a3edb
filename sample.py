"""Text from a trained model, shown as it is made:

    python sample.py runs/gpt-tiny --prompt "import os"
    python sample.py runs/gpt-tiny --file draft.py --top_p 0.9
"""
import argparse
import sys
from pathlib import Path

import torch

import models
import nanodepth
from nanodepth.devices import autocast, cast_weights, find_device, machine_errors
from nanodepth.cli import Parser, UserError, run_folder, run_script, user_errors


def parse(argv):
    parser = Parser("sample.py", description=__doc__)
    parser.add_argument("run", type=run_folder, help="run folder of train.py or convert.py")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a document")
    parser.add_argument("--file", type=Path, help="file with the text to continue, instead of --prompt")
    parser.add_argument("--n", type=int, default=1, help="number of samples, made together [%(default)s]")
    parser.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="length of each [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X",
                        help="0: always the likeliest token [%(default)s]")
    parser.add_argument("--top_k", type=int, metavar="N", help="choose among the likeliest N tokens only")
    parser.add_argument("--top_p", type=float, metavar="X",
                        help="choose among the likeliest tokens that together have the probability X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling [%(default)s]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False,
                        help="compile the decoding step: pays for long texts")
    args = parser.parse_args(argv)
    if min(args.n, args.max_new_tokens, 1 if args.top_k is None else args.top_k) < 1:
        parser.error("--n, --max_new_tokens and --top_k must be at least 1")
    if not 0 <= args.temperature < float("inf") or not 0 <= args.seed < 2 ** 63:
        parser.error("--temperature and --seed must be at least 0, and finite")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p must lie above 0 and be at most 1, not {args.top_p}")
    if args.file and args.prompt:
        parser.error("--prompt and --file are two prompts: give one")
    return args


def read_prompt(args, tokenizer, max_len):
    """The tokens of the prompt, of which a long one keeps its end. UserError if there is no room or no such file."""
    try:
        text = args.prompt if args.file is None else args.file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{args.file}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None
    tokens, room = tokenizer.encode_ordinary(text), max_len - args.max_new_tokens - 1
    if room < 0:
        raise UserError(f"--max_new_tokens {args.max_new_tokens}: at most {max_len - 1} fit in max_len {max_len} of "
                        f"{args.run}")
    if len(tokens) > room:
        print(f"sample.py: the prompt's last {room:,} of {len(tokens):,} tokens are read: with the "
              f"{args.max_new_tokens} new ones they fill max_len {max_len:,}", file=sys.stderr)
    return [tokenizer.eot_token, *tokens[max(0, len(tokens) - room):]]      # documents start with end-of-text


def choose(scores, args, generator):
    """A token (B, 1) by its scores (B, V)."""
    if args.temperature < 1e-6:                                             # 0, or as good as
        return scores.argmax(-1, keepdim=True)
    if args.top_k is not None:
        least = scores.topk(min(args.top_k, scores.size(-1))).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    p = (scores / args.temperature).softmax(-1)
    if args.top_p is not None:
        ranked = p.sort(-1, descending=True).values
        kept = ranked.cumsum(-1) - ranked < args.top_p                      # the likelier ones do not reach top_p
        p = p.masked_fill(p < ranked.masked_fill(~kept, torch.inf).amin(-1, keepdim=True), 0)
    return torch.multinomial(p, 1, generator=generator)


@torch.no_grad()
def tokens_of(model, cache, idx, args, generator, eot, n_vocab):
    """Yields the tokens (B, 1) that continue idx (B, T), until every row has come to the end of its text. Those from
    n_vocab on are padding and never taken.
    """
    step = torch.compile(model.forward, fullgraph=True) if args.compile else model.forward
    ended = torch.zeros_like(idx[:, :1], dtype=torch.bool)
    for i in range(args.max_new_tokens):
        logits, _ = (step if i else model.forward)(idx, cache=cache)
        idx = choose(logits[:, -1, :n_vocab].float(), args, generator)
        yield idx
        ended |= idx == eot
        if ended.all():
            break


def text_of(prompt, tokens, tokenizer):
    """The text of a prompt and of the tokens behind it, up to the first end-of-text."""
    if tokenizer.eot_token in tokens:
        tokens = tokens[:tokens.index(tokenizer.eot_token)]
    return tokenizer.decode([t for t in (*prompt, *tokens) if t < tokenizer.n_vocab])      # untrained: ids of no text


@machine_errors("lower --n, or take --device cpu")
def main(argv):
    args = parse(argv)
    device = find_device(args.device)
    model, tokenizer, config = nanodepth.load(args.run, device)
    with user_errors():
        Cache = models.cache_class(config["model"])
    dtype = config["options"]["dtype"]
    cast_weights(model, dtype)
    prompt = read_prompt(args, tokenizer, model.config.max_len)
    try:
        generator = torch.Generator(device).manual_seed(args.seed)
        idx = torch.tensor([prompt] * args.n, device=device)
        samples, shown = [[] for _ in range(args.n)], 0
        with autocast(device, dtype):
            cache = Cache(model, args.n, len(prompt) + args.max_new_tokens)
            eot, n_vocab = tokenizer.eot_token, config.get("n_vocab")
            for new in tokens_of(model, cache, idx, args, generator, eot, n_vocab):
                for tokens, (token,) in zip(samples, new.tolist()):
                    tokens.append(token)
                text = text_of(prompt[1:], samples[0], tokenizer)
                if args.n == 1 and not text.endswith("\ufffd"):             # half a character
                    print(text[shown:], end="", flush=True)
                    shown = len(text)
    except OverflowError:
        raise UserError(f"--n {args.n} is too large") from None
    except RuntimeError as e:
        if "probability tensor" in str(e):
            raise UserError(f"{args.run} gives no probabilities: its weights are not finite") from None
        raise
    for i, tokens in enumerate(samples):
        text = text_of(prompt[1:], tokens, tokenizer)
        print(text[shown:] if args.n == 1 else f"--- {i + 1}\n{text}")
        if args.n == 1 and tokens[-1] == tokenizer.eot_token:
            print(f"sample.py: the model ended the text after {len(tokens) - 1} tokens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_script("sample.py", main)
