"""The code that the scripts share. In a notebook:

    model, tokenizer, config = nanodepth.load("runs/gpt-tiny")
"""
from nanodepth import ran

ran.keep_texts()


def load(run_dir, device="cpu"):
    """(model in eval mode, tokenizer, config of the run) from a run folder. UserError if it cannot be used."""
    from nanodepth import cli, runs, tokenizers     # not above: these modules import this one first
    run_dir = cli.run_folder(run_dir)
    model, config = runs.load(run_dir, device)
    return model, tokenizers.run_tokenizer(run_dir, config), config
