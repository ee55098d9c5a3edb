"""Benchmarks: an adapter to lm_eval, and the papers' tables."""
import random
import re
import sys

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import models
import nanodepth
from nanodepth.cli import UserError, one_line, progress, user_errors
from nanodepth.devices import autocast, find_device

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    lm_eval, TemplateLM = None, object


# The papers' tables: {name: (shots, {column: (task, metric)})}
GROUPS = {
    "exo": (5, {                                            # ExoFormer, table 1: length-normalised where possible
        "ARC-c": ("arc_challenge", "acc_norm"), "ARC-e": ("arc_easy", "acc_norm"), "Hella.": ("hellaswag", "acc_norm"),
        "OBQA": ("openbookqa", "acc_norm"), "PIQA": ("piqa", "acc_norm"), "Wino.": ("winogrande", "acc")}),
    "sat": (0, {                                            # SATFormer, table 5
        "Wiki. ppl": ("wikitext", "word_perplexity"), "LMB. ppl": ("lambada_openai", "perplexity"),
        "LMB.": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "Hella.": ("hellaswag", "acc_norm"),
        "Wino.": ("winogrande", "acc"), "ARC-e": ("arc_easy", "acc"), "ARC-c": ("arc_challenge", "acc_norm"),
        "SIQA": ("social_iqa", "acc"), "BoolQ": ("boolq", "acc")}),
    "mudd": (0, {column: (task, "acc") for column, task in {    # MUDDFormer, table 3; lm_eval has no RACE-M
        "LAMBADA": "lambada_openai", "PIQA": "piqa", "WinoGrande": "winogrande", "ARC-E": "arc_easy",
        "ARC-C": "arc_challenge", "SciQ": "sciq", "LogiQA": "logiqa", "BoolQ": "boolq", "HellaSwag": "hellaswag",
        "RACE-H": "race"}.items()}),
    "recall": (0, {column: (task, "contains") for column, task in {     # SATFormer, table 2: those that lm_eval has
        "SWDE": "swde", "SQuAD": "squad_completion", "FDA": "fda"}.items()}),
}
GREEDY = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}            # what a task may ask for
PERCENT = re.compile(r"(.*_)?(acc|accuracy)(_.*)?|contains|exact_match")     # metrics in 0 ... 1, shown in percent


class HarnessLM(TemplateLM):
    """A run folder as a language model of lm_eval: simple_evaluate(model=HarnessLM("runs/gpt-tiny"), tasks=[...]).

    run: run folder of train.py or convert.py. batch_tokens: tokens per forward pass. seq_len: longest input; None: the
    model's max_len. A longer prompt loses its beginning, and a line on stderr says so. Log-likelihoods are in nats.
    UserError for an unusable run.
    """
    eot_token_id = prefix_token_id = None                                   # properties of TemplateLM

    def __init__(self, run, device="auto", batch_tokens=16384, seq_len=None):
        super().__init__()
        self._device = find_device(device)
        self.model, self.encoding, config = nanodepth.load(run, self._device)
        self.prefix_token_id = self.eot_token_id = self.encoding.eot_token
        self.n_vocab = config.get("n_vocab")                                # later ids are padding
        self.batch_tokens, self.seq_len = batch_tokens, seq_len or self.model.config.max_len
        if self.seq_len > self.model.config.max_len:
            raise UserError(f"--seq_len {seq_len} is longer than max_len {self.model.config.max_len} of {run}")
        self.name, self.step = config["model"], config["step"]
        self.autocast = autocast(self._device, config["options"]["dtype"])

    def tok_encode(self, string, **kwargs):
        return self.encoding.encode_ordinary(string)

    def prompts(self, contexts, rooms):
        """The last rooms[i] tokens of each context; says how many are cut. An empty one becomes the prefix token."""
        if cut := sum(len(context) > room for context, room in zip(contexts, rooms)):
            print(f"{cut:,} of {len(contexts):,} prompts do not fit in {self.seq_len:,} tokens with their "
                  "continuations: their beginnings are cut off", file=sys.stderr)
        return [context[-room:] or [self.prefix_token_id] for context, room in zip(contexts, rooms)]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[(sum of log p(continuation | context), whether greedy decoding gives it)] of (_, context, continuation)s."""
        scores, sizes = [None] * len(requests), [len(continuation) for _, _, continuation in requests]
        if wrong := [n for n in sizes if not 0 < n <= self.seq_len]:
            raise UserError(f"a continuation of {wrong[0]} tokens: 1 to {self.seq_len} can be scored")
        contexts = self.prompts([context for _, context, _ in requests], [self.seq_len + 1 - n for n in sizes])
        texts = [torch.tensor([*context, *request[2]]) for context, request in zip(contexts, requests)]
        left = sorted(range(len(texts)), key=lambda i: len(texts[i]))       # from the end: memory runs out now or never
        bar = progress(total=len(requests), desc="log-likelihoods", disable=disable_tqdm)
        with self.autocast, bar:
            while left:
                n = max(1, self.batch_tokens // len(texts[left[-1]]))
                rows, left = left[:-n - 1:-1], left[:-n]
                idx = pad_sequence([texts[i] for i in rows], True).to(self._device)         # (B, T + 1)
                for i, logits, tokens in zip(rows, self.model(idx[:, :-1])[0], idx[:, 1:]):
                    scored = slice(len(texts[i]) - 1 - sizes[i], len(texts[i]) - 1)
                    logits, wanted = logits[scored, :self.n_vocab].float(), tokens[scored]
                    score = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
                    scores[i] = (score.sum().item(), bool((logits.argmax(-1) == wanted).all()))
                bar.update(len(rows))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """[log p(text)] of whole texts, each after the prefix token, in windows of seq_len. Scores every token once."""
        windows = []
        for at, request in enumerate(requests):
            pieces = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.seq_len, 1)
            windows += [(at, *make_disjoint_window(piece)) for piece in pieces]
        totals = [0.0] * len(requests)
        for (at, _, _), (score, _) in zip(windows, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[at] += score
        return totals

    @torch.inference_mode()
    def generate_until(self, requests, disable_tqdm=False):
        """[greedy continuation, up to a stop string of the request, the end of the text or max_gen_toks tokens].

        A long prompt keeps at least half of the window. UserError for a task that asks for another way of decoding.
        """
        if not hasattr(self.model, "generate"):
            raise UserError(f"{models.path(self.name)} has no Model.generate to answer with: see gpt.py")
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        options = [normalize_gen_kwargs(request.args[1]) for request in requests]
        for each in options:
            wrong = [f"{key} {value}" for key, value in each.items() if key not in GREEDY and value not in (None, 1)]
            if each["do_sample"] or wrong:
                raise UserError(f"the task asks for {', '.join(wrong) or 'sampling'}: only greedy decoding is "
                                "supported")
        stops, asked = zip(*((each["until"], each["max_gen_toks"]) for each in options))
        limits = [min(n, max(self.seq_len // 2, self.seq_len - max(1, len(context))))
                  for n, context in zip(asked, contexts)]
        if fewer := sum(limit < n for limit, n in zip(limits, asked)):
            print(f"{fewer:,} of {len(asked):,} continuations get fewer than the {max(asked):,} tokens that the task "
                  f"asks for: prompt and continuation share {self.seq_len:,} tokens", file=sys.stderr)
        contexts, texts = self.prompts(contexts, [self.seq_len - n for n in limits]), []
        eot = self.eot_token_id
        bar = progress(zip(contexts, limits, stops), "continuations", len(asked), disable=disable_tqdm)
        with self.autocast:
            for context, limit, stop in bar:
                idx, made, text, found = torch.tensor([context], device=self._device), [], "", []
                for token in self.model.generate(idx, limit, temperature=0, n_vocab=self.n_vocab):
                    made.append(token.item())
                    text = self.encoding.decode([t for t in made if t < self.encoding.n_vocab and t != eot])
                    found = [text.find(word) for word in stop if word and word in text]
                    if found or made[-1] == eot:
                        break
                texts.append(text[:min(found, default=None)])
        return texts


# ------------------------------------------------------------------------------------------------------------ the tasks


def find_tasks(names, task_dir):
    """(lm_eval's task manager, {table: its tasks}): one table per group of GROUPS, and "tasks" for all other tasks.

    UserError without lm_eval, and for an unknown name.
    """
    if lm_eval is None:
        raise UserError("benchmarks need the package lm_eval, 0.4.12 or newer: pip install -U lm_eval")
    from lm_eval.tasks import TaskManager                                   # slow to import
    manager = TaskManager(include_path=task_dir, include_defaults=not task_dir)
    groups = [name for name in names if name in GROUPS]
    tables = {name: list(dict.fromkeys(task for task, _ in GROUPS[name][1].values())) for name in groups}
    if len(groups) < len(names):
        tables["tasks"] = [name for name in names if name not in GROUPS]
    if unknown := [task for tasks in tables.values() for task in tasks if task not in manager.all_tasks]:
        raise UserError(f"no task {unknown[0]!r} in {task_dir or 'lm_eval'}; groups are {', '.join(GROUPS)}")
    return manager, tables


def run_tasks(lm, names, manager, num_fewshot, limit):
    """What lm_eval.evaluate returns. UserError for tasks that do not load."""
    random.seed(0), np.random.seed(1234), torch.manual_seed(1234)           # some tasks shuffle; as simple_evaluate
    try:
        loaded = manager.load(names)
    except Exception as e:                                                  # a broken task file raises anything
        raise UserError(f"{', '.join(names)} cannot be loaded ({type(e).__name__}: {one_line(e)}): lm_eval must "
                        "download data once; or give your own task files with --task_dir") from None
    for task in loaded["tasks"].values():
        shots = 0 if task.OUTPUT_TYPE == "loglikelihood_rolling" else task.get_config("num_fewshot")
        if num_fewshot is not None and shots != 0:              # 0: the task has no shots by design, or scores a text
            shots = num_fewshot
        task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=1234)
    with user_errors():                                                     # lm_eval's errors in a task's settings
        return lm_eval.evaluate(lm, task_dict=loaded, limit=limit, bootstrap_iters=1000, log_samples=False)


def benchmarks(lm, args, manager, tables):
    """{table: {column: {"value", "stderr", "shots"}}} of a HarnessLM, for the tables of find_tasks.

    Accuracies are in percent. Avg. is the mean of a group's accuracies, as in the papers. shots: how many examples the
    questions of the task had before them, whatever was asked for.
    """
    found, longest = {}, lm.seq_len
    for name, tasks in tables.items():
        shots, columns = GROUPS.get(name, (None, {}))
        shots = shots if args.num_fewshot is None else args.num_fewshot
        lm.seq_len = min(longest, 2048) if name == "recall" and not args.seq_len else longest    # 2,048 as in the paper
        done = run_tasks(lm, tasks, manager, shots, args.limit)
        results = done["results"]
        columns = {column: (task, f"{metric},none") for column, (task, metric) in columns.items()} or {
            f"{task} {key.removesuffix(',none')}": (task, key) for task, scores in results.items()
            for key in scores if "," in key and "_stderr," not in key}      # every metric, with every answer filter
        table, accuracies = {}, []
        for column, (task, key) in columns.items():
            value, error = results[task][key], results[task].get(key.replace(",", "_stderr,"))
            scale = 100 if PERCENT.fullmatch(key.split(",")[0]) else 1
            table[column] = {"value": scale * value, "stderr": scale * error if isinstance(error, float) else None,
                             "shots": done["n-shot"].get(task)}
            accuracies += [scale * value] * (scale == 100)
        if name in GROUPS:
            table["Avg."] = {"value": sum(accuracies) / len(accuracies), "stderr": None, "shots": None}
        found[name] = table
    return found
