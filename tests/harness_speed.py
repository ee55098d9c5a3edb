"""eval.py's adapter against lm_eval's own for transformers models, on the same random Llama and the same tasks.

    python tests/harness_speed.py --task_dir DIR --tasks arc_easy,hellaswag --num_fewshot 5 --limit 100

Prints the results of both, the largest difference of a log-likelihood, and the ratio of interleaved times. Needs
lm_eval, transformers and accelerate.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lm_eval import evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers import ByteLevelBPETokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import convert  # noqa: E402
from nanodepth.devices import find_device  # noqa: E402
from nanodepth.harness import HarnessLM  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task_dir", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--num_fewshot", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16, help="of lm_eval's adapter, in sequences [%(default)s]")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = find_device(args.device)

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator((path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.md"))), vocab_size=2048,
                            special_tokens=["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id)).eval().to(device)
    with tempfile.TemporaryDirectory() as folder:
        for saved in (llama, tokenizer):
            saved.save_pretrained(f"{folder}/llama")
        print(convert.convert("llama", Path(folder, "llama"), Path(folder, "run")))
        adapters = {"eval.py": HarnessLM(f"{folder}/run", args.device),
                    "HFLM": HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=args.batch_size, max_length=2048,
                                 dtype="float32")}

    manager = TaskManager(include_path=args.task_dir, include_defaults=False)
    seconds, found = {name: [] for name in adapters}, {}
    for _ in range(args.rounds):
        for name, lm in adapters.items():
            loaded = manager.load(args.tasks.split(","))
            for task in loaded["tasks"].values():
                task.set_config(key="num_fewshot", value=args.num_fewshot)
                task.set_fewshot_seed(seed=1234)
            began = time.perf_counter()
            found[name] = evaluate(lm, task_dict=loaded, limit=args.limit, bootstrap_iters=10)
            seconds[name].append(time.perf_counter() - began)
    ours, theirs = found.values()
    for task in args.tasks.split(","):
        print(task, *({key: value for key, value in one["results"][task].items() if key.endswith(",none")}
                      for one in (ours, theirs)))
        scores = [[float(answer[0][0]) for sample in one["samples"][task] for answer in sample["resps"]]
                  for one in (ours, theirs)]
        difference = max(abs(a - b) for a, b in zip(*scores))
        print(f"  {len(scores[0]):,} log-likelihoods, largest difference {difference:.1e}")
    ratios = [b / a for a, b in zip(*seconds.values())]
    print(f"{device}: HFLM takes {', '.join(f'{ratio:.2f}' for ratio in ratios)} times as long as eval.py")


if __name__ == "__main__":
    main()
