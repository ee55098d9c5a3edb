"""eval.py's benchmarks: log-likelihoods and continuations against brute force, the tables."""
import argparse
import json
import math
import os

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

import settings  # noqa: E402
from analysis import double, random_model  # noqa: E402, F401  (float64: autouse)
from lm_eval.api.instance import Instance  # noqa: E402

import convert  # noqa: E402
import eval as eval_py  # noqa: E402
import models  # noqa: E402
from folders import ranks_file  # noqa: E402
from forked import within  # noqa: E402
from nanodepth import benchmarks, runs  # noqa: E402
from nanodepth.cli import UserError  # noqa: E402
from small import wide  # noqa: E402

PAIR = models.names()[0], models.names()[-1]


def save_run(folder, name, tokenizer="byte", more={}, **options):
    """A run folder with a random model in which no parameter is at its initial value. more: of its config."""
    model = random_model(name, **{"vocab_size": 300, **options})
    config = {"model": name, "model_config": vars(model.config), "tokenizer": tokenizer,
              "options": {"preset": "tiny", "seq_len": 32, "dtype": "fp32"},
              "data": {"path": "gone", "fingerprint": ""}, **more}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model": model.state_dict(), "optimizers": [], "step": 7}, folder / "ckpt.pt")
    return folder


def adapter(folder, name="gpt", *words, **options):
    return benchmarks.HarnessLM(save_run(folder / "run", name, *words, **options), "cpu")


def ask(lm, kind, *arguments):
    """What the adapter answers to requests of this kind, as lm_eval makes them."""
    requests = [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def brute_force(model, context, continuation):
    """(log-likelihood, is greedy) of token lists, one token at a time, no batch, no cache."""
    total, greedy = 0.0, True
    both = (context + continuation)[-49:]
    for at in range(len(both) - len(continuation), len(both)):
        logp = model(torch.tensor([both[:at]]))[0][0, -1].log_softmax(-1)
        total += logp[both[at]].item()
        greedy &= int(logp.argmax()) == both[at]
    return total, greedy


LONG = "the quick brown fox jumps over the lazy dog; 1234567890 times"           # more than max_len
PAIRS = [("Question: why?\nAnswer:", " because"), ("Question: why?\nAnswer:", "!"), ("a", "b"), ("ü", "ßé"),
         ("Trailing space ", "word"), ("", "no context"), (LONG, "cut off on the left"), (LONG, "."), ("x", "y" * 48)]


@pytest.mark.sparse
@pytest.mark.parametrize("name", models.names())
def test_loglikelihood(name, tmp_path, capsys):
    settings.need(name, models.module(name), "Cache")
    lm, pairs, wanted = adapter(tmp_path, name), [*PAIRS, ("  ", "only spaces")], []
    for context, continuation in pairs:
        bare = context.rstrip(" ")                                          # the space belongs to the continuation
        continuation = context[len(bare):] + continuation
        wanted.append(brute_force(lm.model, list(bare.encode()) or [256], list(continuation.encode())))
    for lm.batch_tokens in (1, 100, 16384):
        found = ask(lm, "loglikelihood", *pairs)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        assert np.abs(np.array(found)[:, 0] - np.array(wanted)[:, 0]).max() < 1e-9
        assert capsys.readouterr().err.startswith("2 of 10 prompts do not fit in 48 tokens")


def test_greedy_is_seen(tmp_path):
    lm = adapter(tmp_path, vocab_size=257)
    best = [token.item() for token in lm.model.generate(torch.tensor([list(b"abc")]), 3, temperature=0)]
    requests = [(None, list(b"abc"), answer) for answer in (best, [*best[:2], (best[2] + 1) % 256], best[:1])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(requests, disable_tqdm=True)] == [True, False, True]


def test_padding_ids(tmp_path):
    """A run whose ids end at 257, in a model of 320: in benchmarks probabilities are those among the first 257."""
    lm = adapter(tmp_path, more={"n_vocab": 257}, vocab_size=320)
    logits, answer = lm.model(torch.tensor([[*b"abc", 5]]))[0][0, 2:], torch.tensor([[5], [7]])
    (found, _), = lm._loglikelihood_tokens([(None, list(b"abc"), [5, 7])], disable_tqdm=True)
    assert found == pytest.approx(logits[:, :257].log_softmax(-1).gather(1, answer).sum().item())


def test_tokens_at_the_boundary(tmp_path):
    """No token spans both: the continuation is what follows the context's tokens in the whole text's."""
    folder = save_run(tmp_path / "run", "gpt", "tokenizer.tiktoken")
    ranks_file(folder / "tokenizer.tiktoken", [bytes([i]) for i in range(256)] + [b"th", b" th", b" the", b"re"])
    lm = benchmarks.HarnessLM(folder, "cpu")
    assert lm.tok_encode("a there") == [97, 258, 259]
    for context, continuation, split in (("a ", "there", ([97], [258, 259])), ("a", " there", ([97], [258, 259])),
                                         ("a the", "re", ([97, 258], [259]))):
        (found, _), = ask(lm, "loglikelihood", (context, continuation))
        assert found == pytest.approx(brute_force(lm.model, *split)[0])


def test_texts_without_tokens(tmp_path):
    """A tokenizer.json may give spaces none: as a prompt they are the beginning of a text, as an answer they cannot be
    scored."""
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    own.normalizer = tokenizers.normalizers.Strip()
    own.save(str(save_run(tmp_path / "own", "gpt", "tokenizer.json") / "tokenizer.json"))
    lm = benchmarks.HarnessLM(tmp_path / "own", "cpu")
    assert ask(lm, "loglikelihood", ("  ", "a")) == ask(lm, "loglikelihood", ("", "a"))
    assert ask(lm, "loglikelihood_rolling", ("  ",)) == [0.0]
    with pytest.raises(UserError, match="a continuation of 0 tokens"):
        ask(lm, "loglikelihood", ("a", " "))


def greedy(lm, text, n, room):
    """n greedy tokens after the last `room` of a text, up to end-of-text, as a text."""
    tokens = list(text.encode())[-room:] or [256]
    for _ in range(n):
        tokens.append(int(lm.model(torch.tensor([tokens]))[0][0, -1].argmax()))
    new = tokens[-n:]
    return lm.encoding.decode(new[:new.index(256)] if 256 in new else new)


@pytest.mark.sparse
@pytest.mark.parametrize("name", models.names())
def test_generate_until(name, tmp_path, capsys):
    """With generation_kwargs by all names that lm_eval has for them."""
    settings.need(name, models.module(name), "Cache")
    lm, contexts = adapter(tmp_path, name, vocab_size=257), ["once upon", "a time..", LONG, "", "once upon"]
    whole = [greedy(lm, context, 8, 40) for context in contexts]
    stop = whole[0][len(whole[0]) // 2:][:2]
    options = [{"max_gen_toks": 8, "until": []}, {"max_new_tokens": 8, "until": "\n\n\n", "num_beams": 1},
               {"max_tokens": 8, "do_sample": False, "temperature": 0.7, "top_p": 0.9},
               {"max_completion_tokens": 8, "until": ["", "\n\n\n"], "temperature": 0.0},
               {"max_gen_toks": 8, "max_tokens": 3, "until": [stop, "never"]}]
    whole[4] = whole[4][:whole[4].index(stop)]
    assert ask(lm, "generate_until", *zip(contexts, options)) == whole
    assert capsys.readouterr().err.startswith("1 of 5 prompts do not fit in 48 tokens")


def test_half_of_the_window_is_the_prompts(tmp_path, capsys):
    """However many tokens a task asks for; a short prompt leaves more than half."""
    lm = adapter(tmp_path, vocab_size=256)                                  # has no end-of-text
    assert ask(lm, "generate_until", (LONG, {}), ("x" * 30, {}), ("short", {})) == [
        greedy(lm, LONG, 24, 24), greedy(lm, "x" * 30, 24, 24), greedy(lm, "short", 43, 5)]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("3 of 3 continuations get fewer than the 256 tokens")
    assert second.startswith("2 of 3 prompts do not fit in 48 tokens")


def test_what_cannot_be_done(tmp_path):
    lm = adapter(tmp_path)
    for kind, options, said in (("generate_until", {"do_sample": True}, "sampling"),
                                ("generate_until", {"temperature": 0.5}, "sampling"),
                                ("generate_until", {"num_beams": 4}, "asks for num_beams 4: only"),
                                ("loglikelihood", "b" * 49, "49 tokens: 1 to 48")):
        with pytest.raises(UserError, match=said):
            ask(lm, kind, ("a", options))


@wide()
def test_the_harness_own_adapter_agrees(tmp_path):
    """A GPT2LMHeadModel with lm_eval's adapter, and its weights in gpt3.py with ours."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "<|endoftext|>"]
    inner = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [("Ġ", "a")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=258, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=257,
        bos_token_id=257)).eval()
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "gpt2")
    convert.convert("gpt2", tmp_path / "gpt2", tmp_path / "run")
    ours = benchmarks.HarnessLM(tmp_path / "run", "cpu", seq_len=48)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=48, device="cpu", dtype="float32")
    texts = [(context + continuation,) for context, continuation in PAIRS]
    kinds = {"loglikelihood": PAIRS, "loglikelihood_rolling": texts,
             "generate_until": [(context or "a", {"until": ["a", "\n\n"], "max_gen_toks": 8, "do_sample": False})
                                for context, _ in PAIRS]}
    for kind, arguments in kinds.items():
        found, wanted = (ask(lm, kind, *arguments) for lm in (ours, theirs))
        if kind == "generate_until":
            assert found == wanted
        else:
            np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), atol=1e-9)


# ----------------------------------------------------------------------------------------------------- the command line

ITEMS = [{"question": f"{i} and {i + 1}", "choices": [f"{2 * i + 1}", "several", "x" * (i % 5 + 1)], "label": i % 3}
         for i in range(12)]


def write_task(folder, name, items="items.jsonl", metrics=("acc", "acc_norm"), **more):
    """A task file of lm_eval in this folder; the items are in the folder above it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(json.dumps({                       # JSON is YAML
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder.parent / items)}},
        "output_type": "multiple_choice", "test_split": "test", "fewshot_split": "test",
        "doc_to_text": "Q: {{question}}\nA:", "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": metric} for metric in metrics], **more}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two runs, and a task folder with a small task under each name of the group exo."""
    folder = tmp_path_factory.mktemp("place")
    for name in PAIR:
        save_run(folder / name, name)
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for name in ("small", *(name for name, _ in benchmarks.GROUPS["exo"][1].values())):
        write_task(folder / "tasks", name)
    return folder


def test_tables(place, monkeypatch, capsys):
    """A group against brute force. Of other tasks every metric of every filter has a column, with lm_eval's numbers; a
    tag stands for its tasks; accuracies are in percent, and nothing else."""
    metrics = "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "brier_score"
    write_task(place / "tasks", "two", metrics=metrics, tag="mine", filter_list=[
        {"name": name, "filter": [{"function": "take_first"}]} for name in ("first", "again")])
    monkeypatch.chdir(place)
    words = "--tasks exo,mine --task_dir tasks --num_fewshot 0 --json rows.json --device cpu"
    assert eval_py.main([*PAIR, *words.split()]) == 0
    rows = json.loads((place / "rows.json").read_text())
    assert rows == [json.loads((place / name / "eval.jsonl").read_text()) for name in PAIR]
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith(PAIR)]
    assert heads[0] == ["exo", "ARC-c", "ARC-e", "Hella.", "OBQA", "PIQA", "Wino.", "Avg."]
    assert heads[1] == ["shots", *"000000-"]
    for name, row in zip(PAIR, rows):
        model, right, normed = runs.load(place / name)[0], [], []
        for item in ITEMS:
            context = list(f"Q: {item['question']}\nA:".encode())
            scores = [brute_force(model, context, list(f" {choice}".encode()))[0] for choice in item["choices"]]
            right.append(np.argmax(scores) == item["label"])
            normed.append(np.argmax([s / len(c) for s, c in zip(scores, item["choices"])]) == item["label"])
        exo, error = row["tables"]["exo"], 100 * np.std(normed, ddof=1) / math.sqrt(12)
        assert exo["PIQA"] == exo["ARC-c"] == {"value": pytest.approx(100 * np.mean(normed)),
                                               "stderr": pytest.approx(error), "shots": 0}
        assert exo["Wino."]["value"] == pytest.approx(100 * np.mean(right))
        assert exo["Avg."]["value"] == pytest.approx((5 * 100 * np.mean(normed) + 100 * np.mean(right)) / 6)
        assert row["step"] == 7
    results = benchmarks.lm_eval.simple_evaluate(
        benchmarks.HarnessLM(PAIR[0], "cpu"), tasks=["two"], bootstrap_iters=0,
        task_manager=benchmarks.find_tasks(["two"], "tasks")[0])["results"]["two"]
    assert {name: cell["value"] for name, cell in rows[0]["tables"]["tasks"].items()} == {
        f"two {metric},{kind}": pytest.approx((100 if "acc" in metric else 1) * results[f"{metric},{kind}"])
        for metric in metrics for kind in ("first", "again")}


@pytest.mark.parametrize("asked", [None, 3])
def test_the_shots_are_those_that_the_model_saw(asked, place, monkeypatch):
    """A task may fix their number, have one of its own, or score a whole text, with nothing before it."""
    for name, more in {"fixed": {"num_fewshot": 0}, "own": {"num_fewshot": 2}, "none": {}, "whole": {
            "output_type": "loglikelihood_rolling", "doc_to_target": "whole? {{question}}",
            "metrics": ["word_perplexity"]}}.items():
        write_task(place / "shots", name, doc_to_text=name + "? {{question}}\nA:", **more)
    seen, score = {}, benchmarks.HarnessLM._loglikelihood_tokens

    def spy(self, requests, *words, **options):
        for _, context, answer in requests:
            text = bytes(t for t in (*context, *answer) if t < 256).decode()
            name = text.split("?")[0]
            seen.setdefault(name, set()).add(text.count(f"{name}? ") - 1)
        return score(self, requests, *words, **options)

    monkeypatch.setattr(benchmarks.HarnessLM, "_loglikelihood_tokens", spy)
    monkeypatch.chdir(place)
    words = "--tasks fixed,own,none,whole --task_dir shots --json shots.json --device cpu"
    assert eval_py.main([PAIR[0], *words.split(), *(["--num_fewshot", str(asked)] if asked else [])]) == 0
    (table,) = json.loads((place / "shots.json").read_text())[0]["tables"].values()
    assert all(seen[name.split()[0]] == {cell["shots"]} for name, cell in table.items())
    assert seen.pop("whole") == {0}
    assert {name: n for name, (n,) in seen.items()} == benchmarks.lm_eval.simple_evaluate(
        benchmarks.HarnessLM(PAIR[0], "cpu"), tasks=["fixed", "own", "none"], num_fewshot=asked, bootstrap_iters=0,
        task_manager=benchmarks.find_tasks(["own"], place / "shots")[0])["n-shot"]


@pytest.mark.parametrize("words, said", [
    ("--tasks small,nonsense --task_dir tasks", "no task 'nonsense' in tasks; groups are exo, sat, mudd, recall"),
    ("--tasks small --task_dir nowhere", "no task 'small' in nowhere"),
    ("--tasks small --task_dir tasks --seq_len 49", "longer than max_len 48"),
    ("--tasks gone --task_dir broken", "gone cannot be loaded (FileNotFoundError"),
    ("--tasks worse --task_dir broken", "worse cannot be loaded")])
def test_mistakes(place, words, said, monkeypatch, capsys):
    write_task(place / "broken", "gone", "gone.jsonl")
    write_task(place / "broken", "worse", output_type="unheard_of")
    monkeypatch.chdir(place)
    assert within("eval.py", eval_py.main, PAIR[0], *words.split(), "--device", "cpu") == 2
    last = capsys.readouterr().err.strip().split("\n")[-1]                   # behind what lm_eval says
    assert last.startswith("eval.py: error: ") and said in last


def test_a_run_that_cannot_keep_its_scores(place, monkeypatch, refused):
    """Is refused before the work."""
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "eval.jsonl cannot be written there" in refused(
        "eval.py", *"gpt --tasks small --task_dir tasks".split(), at=place, main=eval_py.main)


def test_recall_reads_2048_tokens(tmp_path, monkeypatch):
    run, seen = save_run(tmp_path / "run", "gpt", max_len=3000), []

    def results(lm, names, manager, shots, limit):
        seen.append((lm.seq_len, shots))
        return {"results": dict.fromkeys(names, {"contains,none": 0.5, "acc,none": 0.5, "acc_norm,none": 0.5}),
                "n-shot": {}}
    monkeypatch.setattr(benchmarks, "run_tasks", results)
    groups = {name: [task for task, _ in benchmarks.GROUPS[name][1].values()] for name in ("recall", "exo")}
    for seq_len in (None, 2500):
        args = argparse.Namespace(seq_len=seq_len, num_fewshot=None, limit=None)
        tables = benchmarks.benchmarks(benchmarks.HarnessLM(run, "cpu", seq_len=seq_len), args, None,
                                       {**groups, "tasks": ["small"]})
        assert tables["recall"]["Avg."]["value"] == 50
    assert seen == [(2048, 0), (3000, 5), (3000, None), (2500, 0), (2500, 5), (2500, None)]
