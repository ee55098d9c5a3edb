"""sample.py: against full forward passes, and a naive choice among the likeliest tokens."""
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import models
import nanodepth
import sample
from small import ROOT, finish, start


@torch.no_grad()
def continued(run, prompt, n, seed, temperature=0.8, top_k=None):
    """The prompt and n tokens more, up to end-of-text."""
    model, tokenizer, _ = nanodepth.load(run)
    tokens, generator = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)], torch.Generator().manual_seed(seed)
    for _ in range(n):
        scores = model(torch.tensor([tokens]))[0][0, -1, :tokenizer.n_vocab]
        best = scores.topk(top_k or len(scores)).indices
        p = torch.zeros(len(scores)).index_copy(0, best, (scores[best] / (temperature or 1)).softmax(-1))
        tokens.append(int(p.multinomial(1, generator=generator) if temperature else best[0]))
    return tokenizer.decode(tokens[1:]).split(tokenizer.decode([tokenizer.eot_token]))[0]


@pytest.mark.parametrize("flags", [{}, {"temperature": 0}, {"top_k": 3, "temperature": 1.5}])
def test_the_same_text_as_without_a_cache(flags, whole, scripts):
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    done = scripts.run("sample.py", whole / "ckpt.pt", "--prompt", "the c", "--max_new_tokens", 40, "--seed", 5, *words)
    assert done.returncode == 0 and done.stdout == continued(whole, "the c", 40, 5, **flags) + "\n", done.stderr


def test_top_p_keeps_the_likeliest():
    """The fewest tokens that have the probability together, by a loop; and none of the others is ever chosen."""
    torch.manual_seed(0)
    model, scores = models.build("gpt", vocab_size=20, n_layer=1, d_model=8, n_head=1, max_len=8), torch.randn(20) * 2
    model.forward = lambda idx, cache: (scores.expand(len(idx), 1, 20), None)
    p = (scores / 0.8).softmax(-1)
    kept, mass = set(), 0.0
    for i in p.argsort(descending=True).tolist():
        if mass < 0.7:
            kept.add(i)
        mass += p[i].item()
    idx = torch.zeros(3000, 1, dtype=torch.long)
    drawn = next(model.generate(idx, 1, 0.8, top_p=0.7))[:, 0].tolist()
    assert set(drawn) == kept and 1 < len(kept) < 10
    share = drawn.count(int(p.argmax())) / len(drawn)
    assert share == pytest.approx(p.max().item() / sum(p[i].item() for i in kept), abs=0.03)
    for flags in ({"top_p": 1e-6}, {"temperature": 1e-40}, {"temperature": 0}):
        assert (next(model.generate(idx, 1, **flags)) == p.argmax()).all()


def test_prompts_are_utf_8_bytes_as_they_are(whole, tmp_path):
    """In any locale; without a byte-order mark."""
    text = "naïve\r\n日本\tend"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    for prompt in (["--file", tmp_path / "a.txt"], ["--prompt", text]):
        words = [whole, *prompt, "--max_new_tokens", 1, "--temperature", 0]
        assert finish(start("sample.py", *words, env=locale, text=False))[0].decode().startswith(text)


def test_a_long_prompt_keeps_its_end(whole, scripts, tmp_path):
    (tmp_path / "long.txt").write_text("x" * 500 + "the cat sat on a mat and the cat ran")
    done = scripts.run("sample.py", whole, "--file", tmp_path / "long.txt", "--max_new_tokens", 30, "--temperature", 0)
    assert done.returncode == 0 and "last 33 of the prompt's 536" in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == continued(whole, " cat sat on a mat and the cat ran", 30, 0, temperature=0) + "\n"


def test_a_text_ends_where_the_model_ends_it(whole, monkeypatch, capsys):
    """And nothing is computed behind it."""
    model, tokenizer, config = nanodepth.load(whole)
    monkeypatch.setattr(nanodepth, "load", lambda *args: (model, tokenizer, config))
    seen, first = [], []
    model.embed.register_forward_pre_hook(lambda module, inputs: first.append(inputs[0][0, 0].item()))

    def choose(module, inputs, logits):
        seen.append(len(seen))
        wanted = torch.tensor(97 if len(seen) < 4 else 256)
        return logits + 1e4 * F.one_hot(wanted, logits.size(-1))
    model.head.register_forward_hook(choose)
    assert sample.main([str(whole), "--prompt", "b", "--max_new_tokens", "20"]) == 0
    said = capsys.readouterr()
    assert said.out == "baaa\n" and len(seen) == 4 and first[0] == 256
    assert said.err == "sample.py: the model ended the text after 3 tokens\n"
    assert sample.main([str(whole), "--prompt", "b"]) == 0                  # by default as many tokens as fit


@pytest.mark.full
def test_a_reader_that_leaves(whole):
    writer = start("sample.py", whole, "--n", 3, "--max_new_tokens", 9)
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait()) == ("", 141)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_the_disk_of_the_output_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "sample.py", "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "No space left on device" in done.stderr
