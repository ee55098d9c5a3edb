"""Loss, perplexity and bits per byte on a validation split, and the papers' benchmarks through lm_eval:

    python eval.py runs/gpt-tiny runs/satformer-tiny                       the validation split of the data they were trained on
    python eval.py runs/A runs/B --tasks exo                               a table of ExoFormer's paper; also: sat, mudd, recall
    python eval.py runs/A --tasks arc_easy,piqa --num_fewshot 5            any tasks of lm_eval (pip install lm_eval)
    python eval.py runs/A --tasks arc_easy --task_dir DIR                  task files of your own, no network
    python eval.py runs/A --tasks mqar                                     associative recall of random pairs, no lm_eval
"""
import argparse
import json
import re
import sys
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import data_prep
import models

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    lm_eval, TemplateLM = None, object

# The papers' tables: {name: (shots, {column: (task, metric)})}
GROUPS = {
    "exo": (5, {                                                            # ExoFormer, table 1: length-normalised where possible
        "ARC-c": ("arc_challenge", "acc_norm"), "ARC-e": ("arc_easy", "acc_norm"), "Hella.": ("hellaswag", "acc_norm"),
        "OBQA": ("openbookqa", "acc_norm"), "PIQA": ("piqa", "acc_norm"), "Wino.": ("winogrande", "acc")}),
    "sat": (0, {                                                            # SATFormer, table 5
        "Wiki. ppl": ("wikitext", "word_perplexity"), "LMB. ppl": ("lambada_openai", "perplexity"),
        "LMB.": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "Hella.": ("hellaswag", "acc_norm"),
        "Wino.": ("winogrande", "acc"), "ARC-e": ("arc_easy", "acc"), "ARC-c": ("arc_challenge", "acc_norm"),
        "SIQA": ("social_iqa", "acc"), "BoolQ": ("boolq", "acc")}),
    "mudd": (0, {                                                           # MUDDFormer, table 3; lm_eval has no RACE-M
        "LAMBADA": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "WinoGrande": ("winogrande", "acc"),
        "ARC-E": ("arc_easy", "acc"), "ARC-C": ("arc_challenge", "acc"), "SciQ": ("sciq", "acc"), "LogiQA": ("logiqa", "acc"),
        "BoolQ": ("boolq", "acc"), "HellaSwag": ("hellaswag", "acc"), "RACE-H": ("race", "acc")}),
    "recall": (0, {                                                         # SATFormer, table 2
        "TriviaQA": ("triviaqa_completion", "contains"), "SWDE": ("swde", "contains"), "SQuAD": ("squad_completion", "contains"),
        "NQ": ("nq_completion", "contains"), "FDA": ("fda", "contains"), "DROP": ("drop_completion", "contains")}),
}
MQAR_PAIRS = (4, 8, 16)


class HarnessLM(TemplateLM):
    """A run folder as a language model of lm_eval, for lm_eval.simple_evaluate(model=HarnessLM("runs/gpt-tiny"), tasks=[...]).

    run: run folder of train.py or convert.py. batch_tokens: tokens per forward pass. seq_len: longest input; what is longer loses
    its beginning. None: the model's max_len. Log-likelihoods are in nats. ValueError, one line, for a run that cannot be used.
    """

    def __init__(self, run, device="auto", batch_tokens=16384, seq_len=None):
        if lm_eval is None:
            raise ValueError("benchmarks need the package lm_eval: pip install lm_eval")
        super().__init__()
        self._device = models.find_device(device)
        self.model, config = models.load(run, self._device)
        self.encoding = data_prep.run_tokenizer(run, config)
        self.batch_tokens, self.seq_len = batch_tokens, seq_len or self.model.config.max_len
        if self.seq_len > self.model.config.max_len:
            raise ValueError(f"--seq_len {seq_len} is longer than max_len {self.model.config.max_len} of {run}")
        self.autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=config["options"]["dtype"] == "bf16")
        self.Cache = models.module(config["model"]).Cache

    @property
    def eot_token_id(self):
        return self.encoding.eot_token

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encoding.encode_ordinary(string)

    def batches(self, groups, extra):
        """Cuts {context (tuple of tokens): its requests} into batches of contexts of one length.

        extra: tokens that will follow each request's context. Longest first, so that memory runs out at once or not at all.
        """
        for length, contexts in groupby(sorted(groups, key=len, reverse=True), key=len):
            batch, rows, most = [], 0, 0
            for context in contexts:
                n, longest = len(groups[context]), max(extra(request) for request in groups[context])
                if batch and (rows + n) * (length + max(most, longest)) > self.batch_tokens:
                    yield batch
                    batch, rows, most = [], 0, 0
                batch, rows, most = [*batch, context], rows + n, max(most, longest)
            yield batch

    def read(self, contexts, room):
        """Logits (B, V) that follow B contexts of one length, and a Cache that holds them and has room for more tokens."""
        idx = torch.tensor(contexts, device=self._device)
        cache = self.Cache(self.model, len(contexts), idx.size(1) + room)
        only_last = self.model.final_norm.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, -1:],))
        logits, _ = self.model(idx, cache=cache)                            # (B, 1, V): the head is half of a small model
        only_last.remove()
        return logits[:, 0], cache

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[(sum of log p(continuation | context), whether greedy decoding gives it)] of requests (_, context, continuation).

        A context that several continuations share is read once.
        """
        groups, scores = {}, [None] * len(requests)
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.seq_len:
                raise ValueError(f"a continuation of {len(continuation)} tokens: 1 to {self.seq_len} can be scored")
            kept = context[-(self.seq_len + 1 - len(continuation)):]
            groups.setdefault(tuple(kept), []).append(i)
        with self.autocast, tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or None, leave=False) as bar:
            for batch in self.batches(groups, lambda i: len(requests[i][2])):
                rows = [(at, i) for at, context in enumerate(batch) for i in groups[context]]
                width = max(len(requests[i][2]) for _, i in rows)
                tokens = torch.zeros(len(rows), width, dtype=torch.long, device=self._device)
                for row, (_, i) in enumerate(rows):
                    tokens[row, :len(requests[i][2])] = torch.tensor(requests[i][2])
                first, cache = self.read(batch, width - 1)
                if len(rows) > len(batch):
                    context_of = torch.tensor([at for at, _ in rows], device=self._device)
                    cache.k, cache.v = ([t[context_of] for t in kept] for kept in (cache.k, cache.v))
                rest = self.model(tokens[:, :-1], cache=cache)[0] if width > 1 else None
                for row, (at, i) in enumerate(rows):
                    n = len(requests[i][2])
                    logits = first[at, None] if n == 1 else torch.cat((first[at, None], rest[row, :n - 1]))     # (n, V)
                    logits, wanted = logits.float(), tokens[row, :n]
                    score = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
                    scores[i] = (score.sum().item(), bool((logits.argmax(-1) == wanted).all()))
                bar.update(len(rows))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """[log p(text)] of whole texts, in windows of seq_len that each token is scored in once, after end-of-text."""
        windows = []
        for at, request in enumerate(requests):
            pieces = get_rolling_token_windows(self.tok_encode(request.args[0]), self.eot_token_id, self.seq_len, 1)
            windows += [(at, *make_disjoint_window(piece)) for piece in pieces]
        totals = [0.0] * len(requests)
        for (at, _, _), (score, _) in zip(windows, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[at] += score
        return totals

    @torch.inference_mode()
    def generate_until(self, requests, disable_tqdm=False):
        """[greedy continuation, up to the first of the request's stop strings, end-of-text or max_gen_toks (256) tokens]."""
        groups, texts, limits, stops = {}, [None] * len(requests), [], []
        for i, request in enumerate(requests):
            context, options = request.args
            if options.get("do_sample") or options.get("temperature"):
                raise ValueError("the task asks for sampling: only greedy decoding is supported")
            until = options.get("until") or []
            stops.append([stop for stop in ([until] if isinstance(until, str) else until) if stop])
            limits.append(min(options.get("max_gen_toks", 256), self.seq_len - 1))
            tokens = self.tok_encode(context) or [self.eot_token_id]
            groups.setdefault(tuple(tokens[limits[i] - self.seq_len:]), []).append(i)
        with self.autocast, tqdm(total=len(requests), desc="continuations", disable=disable_tqdm or None, leave=False) as bar:
            for batch in self.batches(groups, lambda i: limits[i]):
                wanted = [max(limits[i] for i in groups[context]) for context in batch]
                logits, cache = self.read(batch, max(wanted))
                made, finished = [[] for _ in batch], [False] * len(batch)
                while not all(finished):
                    token = logits.argmax(-1)                               # (B,)
                    for row, (context, t) in enumerate(zip(batch, token.tolist())):
                        if not finished[row]:
                            made[row].append(t)
                            text = self.text(made[row])
                            finished[row] = (t == self.eot_token_id or len(made[row]) >= wanted[row]
                                             or all(any(stop in text for stop in stops[i]) for i in groups[context]))
                    if not all(finished):
                        logits = self.model(token[:, None], cache=cache)[0][:, -1]
                for row, context in enumerate(batch):
                    for i in groups[context]:
                        text = self.text(made[row][:limits[i]])
                        texts[i] = text[:min((text.find(stop) for stop in stops[i] if stop in text), default=None)]
                bar.update(sum(len(groups[context]) for context in batch))
        return texts

    def text(self, tokens):
        return self.encoding.decode([t for t in tokens if t < self.encoding.n_vocab and t != self.eot_token_id])


# ------------------------------------------------------------------------------------------------------------- the tasks


def completion_task(name, dataset):
    """A question put as the beginning of a sentence after its passage; correct if what follows contains an answer.

    The form of Arora et al., "Just read twice" (arXiv:2407.05483), on their data: fields context, question, answers.
    """
    def text(doc):
        context, question = re.sub(r"\[(PAR|DOC|TLE)\]", "", doc["context"]).strip(), doc["question"].strip()
        while question and context.lower().endswith(question.lower()):
            context = context[:-len(question)].rstrip()
        return f"{context.rstrip('.')}. {question}"

    def contains(doc, results):
        return {"contains": float(any(answer.lower() in results[0].lower() for answer in doc["answers"]))}

    return {"task": name, "dataset_path": dataset, "output_type": "generate_until", "test_split": "validation", "num_fewshot": 0,
            "doc_to_text": text, "doc_to_target": lambda doc: doc["answers"][0], "process_results": contains,
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48},
            "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}]}


COMPLETION = {"triviaqa_completion": "hazyresearch/based_triviaqa", "nq_completion": "hazyresearch/based_nq_2048",
              "drop_completion": "hazyresearch/based_drop"}


def task_names(tasks, task_dir):
    """(groups of the papers, other tasks, lm_eval's task manager) of --tasks. ValueError for a name that nothing has."""
    if lm_eval is None:
        raise ValueError("benchmarks need the package lm_eval: pip install lm_eval")
    if task_dir and not Path(task_dir).is_dir():
        raise ValueError(f"--task_dir {task_dir} is not a folder")
    from lm_eval.tasks import TaskManager                                   # slow to import
    manager = TaskManager(include_path=task_dir, include_defaults=not task_dir)
    groups = [name for name in tasks if name in GROUPS]
    single = [name for name in tasks if name not in GROUPS]
    known = {*manager.all_tasks, *({} if task_dir else COMPLETION)}
    for name in (*single, *(task for group in groups for task, _ in GROUPS[group][1].values())):
        if name not in known:
            where = f"in {task_dir}" if task_dir else "in lm_eval"
            raise ValueError(f"no task {name!r} {where}; groups are {', '.join(GROUPS)} and mqar")
    return groups, single, manager


def run_tasks(lm, names, manager, num_fewshot, limit):
    """lm_eval's results of some tasks: {task: {"acc,none": ..., "acc_stderr,none": ...}}. ValueError for tasks that do not load."""
    specs = [name if name in manager.all_tasks else completion_task(name, COMPLETION[name]) for name in names]
    try:
        loaded = manager.load(specs)
    except OSError as e:                                                    # ConnectionError is one
        raise ValueError(f"the data of {', '.join(names)} cannot be had ({models.one_line(e)}): they are downloaded once; "
                         "or give --task_dir with task files of your own") from None
    except Exception as e:                                                  # a broken task file raises anything
        raise ValueError(f"{', '.join(names)} cannot be loaded: {type(e).__name__}: {models.one_line(e)}") from None
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=own or 0 if num_fewshot is None or own == 0 else num_fewshot)  # 0: the task's form
        task.set_fewshot_seed(seed=1234)
    return lm_eval.evaluate(lm, task_dict=loaded, limit=limit, bootstrap_iters=1000, log_samples=False)["results"]


def benchmarks(run, args, groups, single, manager):
    """[(title, {column: (value, standard error or None)})] of one run: a table per group, and one for the other tasks.

    Accuracies are in percent. Avg. is the mean of a group's accuracies, as in the papers.
    """
    tables, lm = [], HarnessLM(run, args.device, args.batch_tokens, args.seq_len)
    longest = lm.seq_len
    for group in [*groups, *([None] if single else [])]:
        shots, columns = GROUPS.get(group, (None, {}))
        shots = shots if args.num_fewshot is None else args.num_fewshot
        lm.seq_len = min(longest, 2048) if group == "recall" and not args.seq_len else longest      # 2,048 as in the paper
        results = run_tasks(lm, list(dict.fromkeys(task for task, _ in columns.values())) or single, manager, shots, args.limit)
        columns = columns or {f"{task} {key.removesuffix(',none')}": (task, key.removesuffix(",none")) for task in single
                              for key in results[task] if key.endswith(",none") and "_stderr" not in key}
        table, accuracies = {}, []
        for column, (task, metric) in columns.items():
            value, error = results[task][f"{metric},none"], results[task].get(f"{metric}_stderr,none")
            scale = 100 if metric in ("acc", "acc_norm", "contains", "exact_match") else 1
            table[column] = (scale * value, scale * error if isinstance(error, float) else None)
            accuracies += [scale * value] if scale == 100 else []
        if group:
            table["Avg."] = (sum(accuracies) / len(accuracies), None)
        tables.append((f"{group or 'tasks'}{'' if shots is None else f', {shots}-shot'}", table))
    return tables


@torch.inference_mode()
def mqar(run, device="auto", n_examples=256):
    """{column: (value, standard error)}: percent of the queries answered by the likeliest token, per number of pairs.

    Multi-query associative recall (Arora et al., "Zoology", arXiv:2312.04927) on examples of data_prep.mqar_example that no
    training run has seen; for a model trained on `data_prep.py mqar`, or of any text with at least 256 token ids.
    """
    device, table = models.find_device(device), {}
    model, config = models.load(run, device)
    if model.config.vocab_size < 257:
        raise ValueError(f"{run} has {model.config.vocab_size} token ids, mqar takes 257")
    eot = data_prep.run_tokenizer(run, config).eot_token
    with torch.autocast(device.type, torch.bfloat16, enabled=config["options"]["dtype"] == "bf16"):
        for n in (n for n in MQAR_PAIRS if 4 * n <= model.config.max_len):
            rng = np.random.default_rng((1, n))                             # (0, ...) is the training data
            tokens = torch.from_numpy(np.stack([data_prep.mqar_example(rng, n, eot) for _ in range(n_examples)])).to(device)
            asked = slice(1 + 2 * n, None, 2)                               # the keys of the second half
            hits = [(model(rows[:, :-1])[0][:, asked].argmax(-1) == rows[:, 1:][:, asked]).double().mean(-1) for rows in tokens.split(32)]
            hits = torch.cat(hits)                                          # (n_examples,)
            table[f"MQAR {n}"] = (100 * hits.mean().item(), 100 * (hits.std() / n_examples ** 0.5).item())
    return table


# ----------------------------------------------------------------------------------------------------- the validation split


def evaluate(run, args):
    """One row of the table: a dict. ValueError with one line for a run or data that cannot be used."""
    device = models.find_device(args.device)
    model, config = models.load(run, device)
    opt = config["options"]
    data, seq_len = data_prep.run_data(run, config, args.data), args.seq_len or opt["seq_len"]
    if seq_len > model.config.max_len:
        raise ValueError(f"--seq_len {seq_len} is longer than max_len {model.config.max_len} of {run}")
    batch = max(1, args.batch_tokens // seq_len)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=opt["dtype"] == "bf16")
    row = models.evaluate(model, data.val_batches(args.tokens, batch, seq_len), data.token_bytes, autocast)
    n_params, step = sum(p.numel() for p in model.parameters()), models.read_checkpoint(run)["step"]
    return {"run": run, "model": config["model"], "step": step, "parameters": n_params, "data": str(data.path),
            "fingerprint": data.fingerprint, "seq_len": seq_len, **row}


def print_table(title, tables):
    """tables: {run: {column: (value, standard error or None)}}, the same columns for every run."""
    columns = list(next(iter(tables.values())))
    cells = [[title, *columns]]
    for run, table in tables.items():
        cells.append([run, *(f"{value:.2f}" + ("" if error is None else f" ±{error:.2f}") for value, error in table.values())])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))))


def main():
    parser = models.Parser("eval.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders of train.py or convert.py")
    parser.add_argument("--data", help="data folder; none: the one the run was trained on")
    parser.add_argument("--tokens", type=int, help="only the first so many tokens of the validation split; none: all")
    parser.add_argument("--tasks", help=f"instead of the validation split, comma-separated: {', '.join(GROUPS)}, mqar, tasks of lm_eval")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question; none: as in the paper, or the task's own")
    parser.add_argument("--task_dir", metavar="DIR", help="take the tasks from lm_eval task files in this folder, and no others")
    parser.add_argument("--limit", type=int, help="only the first so many items of each task; for trying out")
    parser.add_argument("--seq_len", type=int, help="longest input in tokens; none: as in training, of tasks max_len (recall: 2048)")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens per forward pass (%(default)s)")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args()
    for name in ("batch_tokens", "tokens", "seq_len", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if (args.num_fewshot or 0) < 0:
        parser.error("--num_fewshot must be at least 0")
    try:
        rows = tasks_main(args) if args.tasks is not None else split_main(args)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    except (ValueError, OSError) as e:
        parser.error(models.one_line(e))
    except (RuntimeError, MemoryError) as e:
        if not models.out_of_memory(e):
            raise
        parser.error("out of memory: lower --batch_tokens")
    return 0


def tasks_main(args):
    if args.data or args.tokens:
        raise ValueError("--data and --tokens are for the validation split, not for --tasks")
    tasks = list(dict.fromkeys(args.tasks.split(",")))
    others = [name for name in tasks if name != "mqar"]
    asked = task_names(others, args.task_dir) if others else None
    for run in args.runs:                                                   # before hours of work
        models.read_checkpoint(run)
    rows, shown = [], {}
    for run in args.runs:
        tables = benchmarks(run, args, *asked) if asked else []
        tables += [("mqar", mqar(run, args.device))] if "mqar" in tasks else []
        rows.append({"run": run, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "step": models.read_checkpoint(run)["step"],
                     "lm_eval": lm_eval.__version__ if asked else None, "limit": args.limit,
                     "tables": {title: {column: {"value": value, "stderr": error} for column, (value, error) in table.items()}
                                for title, table in tables}})
        with open(Path(run) / "eval.jsonl", "a") as f:
            f.write(json.dumps(rows[-1]) + "\n")
        for title, table in tables:
            shown.setdefault(title, {})[run] = table
    for title, tables in shown.items():
        print_table(title, tables)
    return rows


def split_main(args):
    rows = [evaluate(run, args) for run in args.runs]
    width = max(len(row["run"]) for row in rows)
    print(f"{'run':{width}}  {'step':>7}  {'parameters':>13}  {'tokens':>11}  {'loss':>7}  {'ppl':>9}  {'bits/byte':>9}")
    for row in rows:
        bpb = "-" if row["bpb"] is None else f"{row['bpb']:.4f}"
        print(f"{row['run']:{width}}  {row['step']:7,}  {row['parameters']:13,}  {row['eval_tokens']:11,}  {row['loss']:7.4f}  "
              f"{row['ppl']:9.3f}  {bpb:>9}")
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
