"""The LM evaluation harness: an adapter to it, the papers' tables, and associative recall without it."""
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import models
from nanodepth import runs
from nanodepth.devices import autocast, find_device
from nanodepth.cli import UserError, one_line, user_errors
from nanodepth.tokenizers import run_tokenizer

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    lm_eval, TemplateLM = None, object


def harness_version():
    """The version of lm_eval, which must be there. UserError without it."""
    if lm_eval is None:
        raise UserError("benchmarks need the package lm_eval: pip install lm_eval")
    return lm_eval.__version__


# The papers' tables: {name: (shots, {column: (task, metric)})}
GROUPS = {
    "exo": (5, {                                                  # ExoFormer, table 1: length-normalised where possible
        "ARC-c": ("arc_challenge", "acc_norm"), "ARC-e": ("arc_easy", "acc_norm"), "Hella.": ("hellaswag", "acc_norm"),
        "OBQA": ("openbookqa", "acc_norm"), "PIQA": ("piqa", "acc_norm"), "Wino.": ("winogrande", "acc")}),
    "sat": (0, {                                                            # SATFormer, table 5
        "Wiki. ppl": ("wikitext", "word_perplexity"), "LMB. ppl": ("lambada_openai", "perplexity"),
        "LMB.": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "Hella.": ("hellaswag", "acc_norm"),
        "Wino.": ("winogrande", "acc"), "ARC-e": ("arc_easy", "acc"), "ARC-c": ("arc_challenge", "acc_norm"),
        "SIQA": ("social_iqa", "acc"), "BoolQ": ("boolq", "acc")}),
    "mudd": (0, {                                                           # MUDDFormer, table 3; lm_eval has no RACE-M
        "LAMBADA": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "WinoGrande": ("winogrande", "acc"),
        "ARC-E": ("arc_easy", "acc"), "ARC-C": ("arc_challenge", "acc"), "SciQ": ("sciq", "acc"),
        "LogiQA": ("logiqa", "acc"), "BoolQ": ("boolq", "acc"), "HellaSwag": ("hellaswag", "acc"),
        "RACE-H": ("race", "acc")}),
    "recall": (0, {                                                         # SATFormer, table 2
        "TriviaQA": ("triviaqa_completion", "contains"), "SWDE": ("swde", "contains"),
        "SQuAD": ("squad_completion", "contains"), "NQ": ("nq_completion", "contains"),
        "FDA": ("fda", "contains"), "DROP": ("drop_completion", "contains")}),
}
MQAR_PAIRS = (4, 8, 16)


def take_rows(held, rows):
    """A cache of other batch rows: of every tensor in it, at any depth, held[rows]. Counters, of no dimension, stay."""
    if isinstance(held, torch.Tensor):
        return held[rows] if held.ndim else held
    if isinstance(held, (list, tuple)):
        return type(held)(take_rows(part, rows) for part in held)
    if isinstance(held, dict):
        return {key: take_rows(part, rows) for key, part in held.items()}
    if hasattr(held, "__dict__") and not isinstance(held, torch.nn.Module):
        vars(held).update(take_rows(vars(held), rows))
    return held


class HarnessLM(TemplateLM):
    """A run folder as a language model of lm_eval: simple_evaluate(model=HarnessLM("runs/gpt-tiny"), tasks=[...]).

    run: run folder of train.py or convert.py. batch_tokens: tokens per forward pass. seq_len: longest input; what is
    longer loses its beginning. None: the model's max_len. Log-likelihoods are in nats. UserError for an unusable run.
    """

    def __init__(self, run, device="auto", batch_tokens=16384, seq_len=None):
        harness_version()
        super().__init__()
        self._device = find_device(device)
        self.model, config = runs.load(run, self._device)
        self.encoding, self.n_vocab = run_tokenizer(run, config), config.get("n_vocab")     # later ids are padding
        self.batch_tokens, self.seq_len = batch_tokens, seq_len or self.model.config.max_len
        if self.seq_len > self.model.config.max_len:
            raise UserError(f"--seq_len {seq_len} is longer than max_len {self.model.config.max_len} of {run}")
        self.autocast = autocast(self._device, config["options"]["dtype"])
        with user_errors():
            self.Cache = models.cache_class(config["model"])

    @property
    def eot_token_id(self):
        return self.encoding.eot_token

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encoding.encode_ordinary(string)

    def batches(self, groups, extra):
        """Cuts {context (tuple of tokens): its requests} into batches of contexts of one length.

        extra: tokens that will follow each request's context. Longest first: memory runs out at once or not at all.
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
        """Logits (B, V) that follow B contexts of one length, and a Cache that holds them and has room for more."""
        idx = torch.tensor(contexts, device=self._device)
        cache = self.Cache(self.model, len(contexts), idx.size(1) + room)
        norm = getattr(self.model, "final_norm", torch.nn.Identity())       # the head is half of a small model:
        with norm.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, -1:],)):           # (B, 1, C) for it
            logits, _ = self.model(idx, cache=cache)
        return logits[:, -1, :self.n_vocab], cache

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[(sum of log p(continuation | context), whether greedy decoding gives it)] of (_, context, continuation)s.

        A context that several continuations share is read once.
        """
        groups, scores = {}, [None] * len(requests)
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.seq_len:
                raise UserError(f"a continuation of {len(continuation)} tokens: 1 to {self.seq_len} can be scored")
            shortened = context[-(self.seq_len + 1 - len(continuation)):]
            groups.setdefault(tuple(shortened), []).append(i)
        progress = tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or None, leave=False)
        with self.autocast, progress as bar:
            for batch in self.batches(groups, lambda i: len(requests[i][2])):
                rows = [(at, i) for at, context in enumerate(batch) for i in groups[context]]
                width = max(len(requests[i][2]) for _, i in rows)
                tokens = torch.zeros(len(rows), width, dtype=torch.long, device=self._device)
                for row, (_, i) in enumerate(rows):
                    tokens[row, :len(requests[i][2])] = torch.tensor(requests[i][2])
                first, cache = self.read(batch, width - 1)
                if len(rows) > len(batch):
                    context_of = torch.tensor([at for at, _ in rows], device=self._device)
                    cache = take_rows(cache, context_of)
                rest = self.model(tokens[:, :-1], cache=cache)[0][..., :self.n_vocab] if width > 1 else None
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
        """[greedy continuation, up to a stop string of the request, end-of-text or max_gen_toks (256) tokens]."""
        groups, texts, limits, stops = {}, [None] * len(requests), [], []
        for i, request in enumerate(requests):
            context, options = request.args
            if options.get("do_sample") or options.get("temperature"):
                raise UserError("the task asks for sampling: only greedy decoding is supported")
            until = options.get("until") or []
            stops.append([stop for stop in ([until] if isinstance(until, str) else until) if stop])
            limits.append(min(options.get("max_gen_toks", 256), self.seq_len - 1))
            tokens = self.tok_encode(context) or [self.eot_token_id]
            groups.setdefault(tuple(tokens[limits[i] - self.seq_len:]), []).append(i)
        progress = tqdm(total=len(requests), desc="continuations", disable=disable_tqdm or None, leave=False)
        with self.autocast, progress as bar:
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
                        logits = self.model(token[:, None], cache=cache)[0][:, -1, :self.n_vocab]
                for row, context in enumerate(batch):
                    for i in groups[context]:
                        text = self.text(made[row][:limits[i]])
                        texts[i] = text[:min((text.find(stop) for stop in stops[i] if stop in text), default=None)]
                bar.update(sum(len(groups[context]) for context in batch))
        return texts

    def text(self, tokens):
        return self.encoding.decode([t for t in tokens if t < self.encoding.n_vocab and t != self.eot_token_id])


# ------------------------------------------------------------------------------------------------------------ the tasks


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

    return {"task": name, "dataset_path": dataset, "output_type": "generate_until", "test_split": "validation",
            "num_fewshot": 0, "doc_to_text": text, "doc_to_target": lambda doc: doc["answers"][0],
            "process_results": contains,
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48},
            "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}]}


COMPLETION = {"triviaqa_completion": "hazyresearch/based_triviaqa", "nq_completion": "hazyresearch/based_nq_2048",
              "drop_completion": "hazyresearch/based_drop"}


def task_names(tasks, task_dir):
    """(groups of the papers, other tasks, lm_eval's task manager) of --tasks. UserError for a name that nothing has."""
    harness_version()
    if task_dir and not Path(task_dir).is_dir():
        raise UserError(f"--task_dir {task_dir} is not a folder")
    from lm_eval.tasks import TaskManager                                   # slow to import
    manager = TaskManager(include_path=task_dir, include_defaults=not task_dir)
    groups = [name for name in tasks if name in GROUPS]
    single = [name for name in tasks if name not in GROUPS]
    known = {*manager.all_tasks, *({} if task_dir else COMPLETION)}
    for name in (*single, *(task for group in groups for task, _ in GROUPS[group][1].values())):
        if name not in known:
            where = f"in {task_dir}" if task_dir else "in lm_eval"
            raise UserError(f"no task {name!r} {where}; groups are {', '.join(GROUPS)} and mqar")
    return groups, single, manager


def run_tasks(lm, names, manager, num_fewshot, limit):
    """lm_eval's results of some tasks: {task: {"acc,none": ..., "acc_stderr,none": ...}}.

    UserError for tasks that do not load.
    """
    specs = [name if name in manager.all_tasks else completion_task(name, COMPLETION[name]) for name in names]
    try:
        loaded = manager.load(specs)
    except OSError as e:                                                    # ConnectionError is one
        raise UserError(f"the data of {', '.join(names)} cannot be had ({one_line(e)}): they are downloaded once; "
                        "or give --task_dir with task files of your own") from None
    except Exception as e:                                                  # a broken task file raises anything
        raise UserError(f"{', '.join(names)} cannot be loaded: {type(e).__name__}: {one_line(e)}") from None
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        if num_fewshot is not None and shots != 0:                          # 0: the task's form has none
            shots = num_fewshot
        task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=1234)
    with user_errors():                                                     # what lm_eval says of a task's settings
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
        lm.seq_len = min(longest, 2048) if group == "recall" and not args.seq_len else longest   # 2,048 as in the paper
        tasks = list(dict.fromkeys(task for task, _ in columns.values())) or single
        results = run_tasks(lm, tasks, manager, shots, args.limit)
        if not group:                                                       # every metric, of every filter
            columns = {f"{task} {key.removesuffix(',none')}": (task, key) for task, scores in results.items()
                       for key in scores if "," in key and "_stderr," not in key}
        table, accuracies = {}, []
        for column, (task, key) in columns.items():
            metric, _, kind = key.partition(",")                            # kind: of the filter of the answers
            value, error = (results[task].get(f"{name},{kind or 'none'}") for name in (metric, f"{metric}_stderr"))
            scale = 100 if metric in ("acc", "acc_norm", "contains", "exact_match") else 1
            table[column] = (scale * value, scale * error if isinstance(error, float) else None)
            if scale == 100:
                accuracies.append(scale * value)
        if group:
            table["Avg."] = (sum(accuracies) / len(accuracies), None)
        tables.append((f"{group or 'tasks'}{'' if shots is None else f', {shots}-shot'}", table))
    return tables


def mqar_example(rng, n_pairs, eot, n_asked=1):
    """int64 (1 + 2 n_pairs (1 + n_asked),): end-of-text, n pairs of key and value, n_asked times the pairs reordered.

    A key is one of the ids 0 ... 127, all different; a value one of 128 ... 255. From the second round on a value
    follows from its key.
    """
    pairs = np.stack((rng.permutation(128)[:n_pairs], rng.integers(128, 256, n_pairs)), axis=1)
    return np.concatenate(([eot], pairs.ravel(), *(rng.permutation(pairs).ravel() for _ in range(n_asked))))


@torch.inference_mode()
def mqar(run, device="auto", n_examples=256):
    """{column: (value, standard error)}: percent of the queries answered by the likeliest token, per number of pairs.

    Multi-query associative recall (Arora et al., "Zoology", arXiv:2312.04927) on examples of mqar_example that no
    training run has seen; for a model trained on `data_prep.py mqar`, or of any text with at least 256 token ids.
    """
    device, table = find_device(device), {}
    model, config = runs.load(run, device)
    if model.config.vocab_size < 257:
        raise UserError(f"{run} has {model.config.vocab_size} token ids, mqar takes 257")
    eot = run_tokenizer(run, config).eot_token
    with autocast(device, config["options"]["dtype"]):
        for n in (n for n in MQAR_PAIRS if 4 * n <= model.config.max_len):
            rng = np.random.default_rng((1, n))                             # (0, ...) is the training data
            tokens = torch.from_numpy(np.stack([mqar_example(rng, n, eot) for _ in range(n_examples)])).to(device)
            asked = slice(1 + 2 * n, None, 2)                               # the keys of the second half
            answers = torch.cat([model(rows[:, :-1])[0][:, asked].argmax(-1) for rows in tokens.split(32)])
            hits = (answers == tokens[:, 1:][:, asked]).double().mean(-1)   # (n_examples,)
            table[f"MQAR {n}"] = (100 * hits.mean().item(), 100 * (hits.std() / n_examples ** 0.5).item())
    return table
