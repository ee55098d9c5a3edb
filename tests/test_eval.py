"""eval.py's benchmarks: log-likelihoods and continuations against brute force, the tables."""
import argparse
import base64
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

from analysis import double  # noqa: E402, F401  (float64: autouse)
from lm_eval.api.instance import Instance  # noqa: E402

import eval as eval_py  # noqa: E402
import models  # noqa: E402
import settings  # noqa: E402
from forked import within  # noqa: E402
from nanodepth import harness, runs  # noqa: E402
from nanodepth.data import Data  # noqa: E402
from small import wide  # noqa: E402
from test_models import need  # noqa: E402

PAIR = models.names()[0], models.names()[-1]
ROOT = Path(__file__).parent.parent
SHAPE = dict(vocab_size=300, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=48)


def save_run(folder, name, tokenizer="byte", **options):
    """A run folder with a random model in which no parameter is at its initial value."""
    torch.manual_seed(0)
    model = models.build(name, **settings.fitting(name, SHAPE) | options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.1))
    config = {"model": name, "model_config": vars(model.config),
              "options": {"preset": "tiny", "seq_len": 32, "dtype": "fp32"}, "tokenizer": tokenizer,
              "data": {"path": "gone", "fingerprint": ""}}
    folder.mkdir()
    torch.save({"model": model.state_dict(), "optimizers": [], "step": 7, "tokens": 70, "rng": torch.get_rng_state(),
                "config": config, "tokenizer": tokenizer}, folder / "ckpt.pt")
    return folder


def instances(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(arguments)]


def brute_force(model, context, continuation, seq_len):
    """(log-likelihood, is greedy) of token lists, one token at a time, no batch, no cache."""
    total, greedy = 0.0, True
    both = (context + continuation)[-(seq_len + 1):]
    for at in range(len(both) - len(continuation), len(both)):
        logp = model(torch.tensor([both[:at]]))[0][0, -1].log_softmax(-1)
        total += logp[both[at]].item()
        greedy &= int(logp.argmax()) == both[at]
    return total, greedy


LONG = "the quick brown fox jumps over the lazy dog; 1234567890 times"           # more than max_len
PAIRS = [("Question: why?\nAnswer:", " because"), ("Question: why?\nAnswer:", " no"), ("Question: why?\nAnswer:", "!"),
         ("a", "b"), ("Trailing space ", "word"), ("", "no context"), ("Query: why so?\nAnswer:", " yes"),
         (LONG, "cut off on the left"),
         (LONG, "."), ("x", "y" * 48), ("ü", "ßé"), ("Question: why?\nAnswer:", " no")]


@pytest.mark.parametrize("name", models.names())
def test_loglikelihood(name, tmp_path):
    need(name, models.module(name), "Cache")
    lm = harness.HarnessLM(save_run(tmp_path / "run", name), device="cpu")
    model = runs.load(tmp_path / "run")[0]
    wanted = []
    for context, continuation in PAIRS:
        bare = context.rstrip(" ")                                          # the space belongs to the continuation
        continuation = context[len(bare):] + continuation
        wanted.append(brute_force(model, list(bare.encode()) or [256], list(continuation.encode()), 48))
    for batch_tokens in (1, 100, 16384):
        lm.batch_tokens = batch_tokens
        found = lm.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        assert np.abs(np.array(found)[:, 0] - np.array(wanted)[:, 0]).max() < 1e-9


def test_greedy_is_seen(tmp_path):
    lm = harness.HarnessLM(save_run(tmp_path / "run", "gpt", vocab_size=257), device="cpu")
    idx = torch.tensor([list(b"abc")])
    best = runs.load(tmp_path / "run")[0].generate(idx, 3, temperature=0)[0, 3:].tolist()
    other = [*best[:2], (best[2] + 1) % 256]
    requests = [(None, list(b"abc"), best), (None, list(b"abc"), other), (None, list(b"abc"), best[:1])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(requests, disable_tqdm=True)] == [True, False, True]


def test_padding_ids_are_not_scored(tmp_path):
    """A run whose ids end at 257, in a model of 320: probabilities are those among the first 257."""
    run = save_run(tmp_path / "run", "gpt", vocab_size=320)
    checkpoint = torch.load(run / "ckpt.pt", weights_only=True)
    checkpoint["config"]["n_vocab"] = 257
    torch.save(checkpoint, run / "ckpt.pt")
    lm, continuation = harness.HarnessLM(run, device="cpu"), [5, 7]
    logits = runs.load(run)[0](torch.tensor([[*b"abc", 5]]))[0][0, 2:]
    wanted = sum(x[:257].log_softmax(-1)[t].item() for x, t in zip(logits, continuation))
    (found, _), = lm._loglikelihood_tokens([(None, list(b"abc"), continuation)], disable_tqdm=True)
    assert found == pytest.approx(wanted) and found > sum(
        x.log_softmax(-1)[t].item() for x, t in zip(logits, continuation)) + 1e-3


def test_a_shared_context_is_read_once(tmp_path):
    lm = harness.HarnessLM(save_run(tmp_path / "run", "gpt"), device="cpu")
    seen = []
    lm.model.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    lm.loglikelihood(instances("loglikelihood", *[("1234567890", f" {i}{i}") for i in range(4)], ("0987654321", " 5")),
                     disable_tqdm=True)
    # the two contexts, then the five continuations without their last tokens
    assert seen == [(2, 10), (5, 2)]


def test_tokens_at_the_boundary(tmp_path):
    """No token spans both: the continuation is what follows the context's tokens in the whole text's."""
    folder = save_run(tmp_path / "run", "gpt", tokenizer="tokenizer.tiktoken")
    merges = [bytes([i]) for i in range(256)] + [b"th", b" th", b" the", b"re"]
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(base64.b64encode(m) + b" %d\n" % i
                                                         for i, m in enumerate(merges)))
    lm, model = harness.HarnessLM(folder, device="cpu"), runs.load(folder)[0]
    assert lm.tok_encode("a there") == [97, 258, 259]
    for context, continuation, split in (("a ", "there", ([97], [258, 259])), ("a", " there", ([97], [258, 259])),
                                         ("a the", "re", ([97, 258], [259]))):
        found = lm.loglikelihood(instances("loglikelihood", (context, continuation)), disable_tqdm=True)[0]
        assert found[0] == pytest.approx(brute_force(model, *split, 48)[0])


def test_rolling(tmp_path):
    """Every token is scored once: the first window after end-of-text, the others with as much context as fits."""
    lm = harness.HarnessLM(save_run(tmp_path / "run", PAIR[1]), device="cpu", seq_len=16)
    model = runs.load(tmp_path / "run")[0]
    texts = ["short", "", "exactly 16 bytes", "a longer text, of three windows and a bit"]
    wanted = []
    for text in texts:
        tokens, total = [256, *text.encode()], 0.0
        for start in range(1, len(tokens), 16):
            end = min(start + 16, len(tokens))
            total += brute_force(model, tokens[max(0, end - 17):start], tokens[start:end], 16)[0]
        wanted.append(total)
    found = lm.loglikelihood_rolling(instances("loglikelihood_rolling", *[(text,) for text in texts]),
                                     disable_tqdm=True)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("name", models.names())
def test_generate_until(name, tmp_path):
    need(name, models.module(name), "Cache")
    lm = harness.HarnessLM(save_run(tmp_path / "run", name, vocab_size=257), device="cpu")
    model = runs.load(tmp_path / "run")[0]

    def greedy(text, n):
        tokens = list(text.encode())[-(48 - n):] or [256]
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
        new = tokens[-n:]
        return lm.text(new[:new.index(256)] if 256 in new else new)

    contexts = ["once upon", "a time..", LONG, "", "once upon"]
    whole = [greedy(context, 8) for context in contexts]
    stop = whole[0][len(whole[0]) // 2:][:2]
    options = [{"max_gen_toks": 8, "until": []}, {"max_gen_toks": 8, "until": "\n\n\n"},
               {"max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
               {"max_gen_toks": 8, "until": ["", "\n\n\n"]}, {"max_gen_toks": 8, "until": [stop, "never"]}]
    whole[4] = whole[4][:whole[4].index(stop)]
    for batch_tokens in (1, 16384):
        lm.batch_tokens = batch_tokens
        assert lm.generate_until(instances("generate_until", *zip(contexts, options)), disable_tqdm=True) == whole


def test_what_cannot_be_done(tmp_path, monkeypatch):
    lm = harness.HarnessLM(save_run(tmp_path / "run", "gpt"), device="cpu")
    with pytest.raises(ValueError, match="sampling"):
        lm.generate_until(instances("generate_until", ("a", {"do_sample": True})), disable_tqdm=True)
    with pytest.raises(ValueError, match="49 tokens: 1 to 48"):
        lm.loglikelihood(instances("loglikelihood", ("a", "b" * 49)), disable_tqdm=True)
    with pytest.raises(ValueError, match="longer than max_len 48"):
        harness.HarnessLM(tmp_path / "run", seq_len=49)
    monkeypatch.setattr(harness, "lm_eval", None)
    for call in (lambda: harness.HarnessLM(tmp_path / "run"), lambda: harness.task_names(["exo"], None)):
        with pytest.raises(ValueError, match="pip install lm_eval"):
            call()


@wide()
def test_the_harness_own_adapter_agrees(place, tmp_path):
    """A LlamaForCausalLM with lm_eval's adapter, and its weights in gpt.py with ours."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    import convert
    vocab = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "<|endoftext|>"])}
    tokenizer = Tokenizer(BPE(vocab, [("Ġ", "a")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, initializer_range=0.2, eos_token_id=257,
        bos_token_id=257)).eval()
    for saved in (llama, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    convert.convert("llama", tmp_path / "llama", tmp_path / "run")
    ours = harness.HarnessLM(tmp_path / "run", device="cpu")
    theirs = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=3, max_length=48, device="cpu", dtype="float32")
    texts = [(context + continuation,) for context, continuation in PAIRS]
    kinds = {"loglikelihood": PAIRS, "loglikelihood_rolling": texts,
             "generate_until": [(context or "a", {"until": ["a", "\n\n"], "max_gen_toks": 8, "do_sample": False})
                                for context, _ in PAIRS]}
    for kind, arguments in kinds.items():
        found, wanted = (getattr(lm, kind)(instances(kind, *arguments), disable_tqdm=True) for lm in (ours, theirs))
        if kind == "generate_until":
            assert found == wanted
        else:
            np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), atol=1e-9)
    results = []
    for lm in (ours, theirs):
        loaded = TaskManager(include_path=str(place / "tasks"), include_defaults=False).load(["small"])
        results.append(harness.lm_eval.evaluate(lm, task_dict=loaded, bootstrap_iters=10)["results"]["small"])
    assert results[0] == results[1]


# ----------------------------------------------------------------------------------------------------- the command line

TASK = """task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ITEMS = [{"question": f"{i} and {i + 1}", "choices": [f"{2 * i + 1}", "several", "x" * (i % 5 + 1)], "label": i % 3}
         for i in range(12)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two runs, and a task folder with a small task under each name of the group exo."""
    folder = tmp_path_factory.mktemp("place")
    for name in PAIR:
        save_run(folder / name, name)
    (folder / "tasks").mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for task in ("small", *(task for task, _ in harness.GROUPS["exo"][1].values())):
        text = TASK.replace("NAME", task).replace("ITEMS", str(folder / "items.jsonl"))
        (folder / "tasks" / f"{task}.yaml").write_text(text)
    return folder


def run_eval(place, *words):
    return subprocess.run([sys.executable, str(ROOT / "eval.py"), *words, "--device", "cpu"], cwd=place,
                          capture_output=True, text=True,
                          env={**os.environ, "HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("T", [16, 48])
def test_validation_against_loops(T, data, tmp_path):
    """Loss and bits per byte in windows of T tokens, one after the other."""
    run = save_run(tmp_path / "run", "gpt")
    words = ["--data", str(data), "--tokens", "300", "--seq_len", str(T), "--json", str(tmp_path / "e.json")]
    assert eval_py.main([str(run), *words, "--device", "cpu"]) == 0
    (row,), model = json.loads((tmp_path / "e.json").read_text()), runs.load(run)[0]
    tokens, nats, size = torch.tensor(Data(data).shards["val"][0][:301].astype(int)), 0.0, 0
    with torch.no_grad():
        for at in range(0, 300, T):
            window = tokens[at:at + T + 1]
            logp = model(window[None, :-1])[0].log_softmax(-1)[0]
            nats -= sum(logp[i, t].item() for i, t in enumerate(window[1:].tolist()))
            size += sum(t < 256 for t in window[1:].tolist())
    assert row["loss"] == pytest.approx(nats / 300) and row["eval_tokens"] == 300
    assert row["bpb"] == pytest.approx(nats / math.log(2) / size)


def test_tables(place):
    done = run_eval(place, *PAIR, "--tasks", "exo,small,mqar", "--task_dir", "tasks", "--num_fewshot", "0", "--json",
                    "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((place / "rows.json").read_text())
    assert rows == [json.loads((place / name / "eval.jsonl").read_text()) for name in PAIR]
    heads = [line.split() for line in done.stdout.splitlines() if not line.startswith(PAIR)]
    assert heads[0] == ["exo,", "0-shot", "ARC-c", "ARC-e", "Hella.", "OBQA", "PIQA", "Wino.", "Avg."]
    for name, row in zip(PAIR, rows):
        model, right, normed = runs.load(place / name)[0], [], []
        for item in ITEMS:
            context = list(f"Q: {item['question']}\nA:".encode())
            scores = [brute_force(model, context, list(f" {choice}".encode()), 48)[0] for choice in item["choices"]]
            right.append(np.argmax(scores) == item["label"])
            normed.append(np.argmax([s / len(c) for s, c in zip(scores, item["choices"])]) == item["label"])
        exo, small = row["tables"]["exo, 0-shot"], row["tables"]["tasks, 0-shot"]
        error = 100 * np.std(normed, ddof=1) / math.sqrt(12)
        assert exo["PIQA"] == exo["ARC-c"] == small["small acc_norm"] == {"value": pytest.approx(100 * np.mean(normed)),
                                                                        "stderr": pytest.approx(error)}
        assert exo["Wino."]["value"] == small["small acc"]["value"] == pytest.approx(100 * np.mean(right))
        assert exo["Avg."]["value"] == pytest.approx((5 * 100 * np.mean(normed) + 100 * np.mean(right)) / 6)
        assert row["step"] == 7 and set(row["tables"]["mqar"]) == {"MQAR 4", "MQAR 8"}


FILTERS = """filter_list:
  - {name: first, filter: [{function: take_first}]}
  - {name: again, filter: [{function: take_first}]}
tag: mine
"""


def test_named_filters_and_tags(place):
    """Each metric of each filter has a column; a tag stands for its tasks."""
    (place / "filtered").mkdir()
    text = TASK.replace("NAME", "two").replace("ITEMS", str(place / "items.jsonl"))
    (place / "filtered" / "two.yaml").write_text(text + FILTERS)
    done = run_eval(place, PAIR[0], "--tasks", "mine", "--task_dir", "filtered", "--json", "filtered.json")
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((place / "filtered.json").read_text())[0]["tables"].values()
    assert set(table) == {f"two {metric},{kind}" for metric in ("acc", "acc_norm") for kind in ("first", "again")}
    assert all(0 <= cell["value"] <= 100 and cell["stderr"] > 0 for cell in table.values())


def test_runs_with_other_columns(capsys):
    eval_py.print_table("mqar", {"a": {"MQAR 4": (1.0, None)}, "b": {"MQAR 4": (2.0, 0.5), "MQAR 8": (3.0, None)}})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["mqar", "MQAR", "4", "MQAR", "8"], ["a", "1.00", "-"], ["b", "2.00", "±0.50", "3.00"]]


def test_examples_before_the_question(place, monkeypatch):
    from lm_eval.tasks import TaskManager
    lm, seen = harness.HarnessLM(place / PAIR[0], device="cpu"), []

    def loglikelihoods(requests, **options):
        seen.extend(bytes(request[1]) for request in requests)
        return [(0.0, False)] * len(requests)

    monkeypatch.setattr(lm, "_loglikelihood_tokens", loglikelihoods)
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    harness.run_tasks(lm, ["small"], manager, 2, None)
    assert seen and all(text.count(b"Q: ") == 3 for text in seen)


@pytest.mark.parametrize("words, message", [
    ("gpt --tasks small,nonsense --task_dir tasks",
     "no task 'nonsense' in tasks; groups are exo, sat, mudd, recall and mqar"),
    ("gpt --tasks sat --task_dir tasks", "no task 'wikitext' in tasks"),
    ("gpt --tasks small --task_dir nowhere", "--task_dir nowhere is not a folder"),
    ("gpt --tasks= --task_dir tasks", "no task ''"),
    ("gpt none --tasks mqar", "none/ckpt.pt does not exist"),
    ("gpt --tasks mqar --limit 3", "are not for mqar"), ("gpt --tasks mqar --task_dir tasks", "are not for mqar"),
    ("gpt --json no/such/folder/x.json", "no/such/folder/x.json cannot be written"),
    ("gpt --tasks small --task_dir tasks --data x", "--data and --tokens are for the validation split"),
    ("gpt --tasks small --task_dir tasks --limit 0", "--limit must be at least 1"),
    ("gpt --tasks small --num_fewshot -1", "--num_fewshot must be at least 0"),
    ("gpt --tasks small --task_dir tasks --seq_len 49", "longer than max_len 48"),
    ("gpt --tasks broken --task_dir broken", "the data of broken cannot be had"),
    ("gpt --tasks worse --task_dir broken", "worse cannot be loaded"),
])
def test_mistakes(place, words, message, monkeypatch, capsys):
    (place / "broken").mkdir(exist_ok=True)
    (place / "broken" / "broken.yaml").write_text(TASK.replace("NAME", "broken").replace("ITEMS", "gone.jsonl"))
    worse = TASK.replace("NAME", "worse").replace("ITEMS", str(place / "items.jsonl"))
    (place / "broken" / "worse.yaml").write_text(worse.replace("multiple_choice", "unheard_of"))
    monkeypatch.chdir(place)
    code = within("eval.py", eval_py.main, *words.split(), "--device", "cpu")
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert code == 2 and last.startswith("eval.py: error: ") and message in last


def test_a_run_that_cannot_keep_its_scores(place, monkeypatch, capsys):
    """Is refused before the work."""
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert within("eval.py", eval_py.main, place / "gpt", "--tasks", "mqar", "--device", "cpu") == 2
    assert "eval.jsonl cannot be written there" in capsys.readouterr().err


def test_recall_reads_2048_tokens(tmp_path, monkeypatch):
    run, seen = save_run(tmp_path / "run", "gpt", max_len=3000), []

    def results(lm, names, *words):
        seen.append(lm.seq_len)
        return {name: {"acc,none": 0.5, "acc_norm,none": 0.5, "contains,none": 0.5} for name in names}
    monkeypatch.setattr(harness, "run_tasks", results)
    for seq_len in (None, 2500):
        args = argparse.Namespace(device="cpu", batch_tokens=100, seq_len=seq_len, num_fewshot=None, limit=None)
        tables = harness.benchmarks(run, args, ["recall", "exo"], ["small"], None)
        assert [title for title, _ in tables] == ["recall, 0-shot", "exo, 5-shot", "tasks"]
        assert tables[0][1]["Avg."] == (50, None)
    assert seen == [2048, 3000, 3000, 2500, 2500, 2500]


def test_no_network(place):
    done = run_eval(place, "gpt", "--tasks", "piqa,drop_completion")
    last = done.stderr.strip().split("\n")[-1]
    assert done.returncode == 2, done.stderr
    assert last.startswith("eval.py: error: the data of piqa, drop_completion cannot be had"), done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------------------- recall


def test_completion_task(place, tmp_path):
    docs = [{"context": "Anna met [PAR] Ben.  The one she met was", "question": "The one she met was",
             "answers": ["Ben", "Benjamin"]},
            {"context": "It rained in May", "question": "It rained in the month of", "answers": ["may"]}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    from lm_eval.tasks import TaskManager
    config = harness.completion_task("x", str(tmp_path / "data"))
    task = TaskManager(include_defaults=False).load([config])["tasks"]["x"]
    assert [task.doc_to_text(doc) for doc in docs] == [
        "Anna met  Ben. The one she met was", "It rained in May. It rained in the month of"]
    assert [task.process_results(docs[0], [text])["contains"] for text in (" called BEN Smith", " Be n")] == [1.0, 0.0]

    class Always(harness.TemplateLM):
        eot_token_id, tok_encode, loglikelihood_rolling, _loglikelihood_tokens = 0, None, None, None

        def generate_until(self, requests, disable_tqdm=False):
            assert [request.args[1] for request in requests] == [{"until": ["\n"], "max_gen_toks": 48}] * 2
            return [" Ben, in May", " June"]

    results = harness.lm_eval.evaluate(Always(), task_dict={"tasks": {"x": task}, "groups": {}}, log_samples=False)
    assert results["results"]["x"]["contains,none"] == 0.5
