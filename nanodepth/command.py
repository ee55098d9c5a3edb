"""From the words of train.py's command line to its options: presets, runs that go on, weights of another run."""
from dataclasses import fields, replace
from pathlib import Path

import models
from nanodepth import presets, runs
from nanodepth.options import Parser, UserError, add_options, pick, run_folder, shell, user_errors

MAY_CHANGE = {"resume", "data", "device", "compile", "threads", "micro_batch", "eval_every", "eval_tokens", "max_steps",
              "final_eval_tokens", "save_every", "sample_every", "wandb", "tensorboard"}    # when a run is resumed


def parse(argv, Options, description, constant_until):
    """(Options, dict of the model's Config fields, dict of the flags as given). UserError for a mistake.

    constant_until(options): the steps after which a run may still become longer.
    """
    first = Parser("train.py", add_help=False)
    for name in ("model", "preset", "resume", "init_from"):
        first.add_argument(f"--{name}")
    asked = first.parse_known_args(argv)[0]
    for name, words in vars(asked).items():
        if words == "":
            raise UserError(f"--{name} is empty: give a name, or leave it out")
    checkpoint, old = None, {"options": {}, "model_config": {}}
    if asked.resume:
        checkpoint = runs.read_checkpoint(run_folder(asked.resume))
        old = checkpoint["config"]
        runs.check_options(asked.resume, old)
        if "converted" in old:
            raise UserError(f"{asked.resume} holds converted weights, which cannot be resumed: "
                            f"start a new run with --init_from {asked.resume}")
    elif asked.init_from:
        config = runs.read_checkpoint(run_folder(asked.init_from))["config"]
        runs.check_options(asked.init_from, config)
        old = {"options": {"model": config["model"]}, "model_config": config["model_config"]}
    model = asked.model or old["options"].get("model", Options.model)
    preset = {} if asked.resume else presets.find(asked.preset or Options.preset)      # a run's options are complete
    defaults = {**preset, **old["options"], **old["model_config"]}
    with user_errors():
        config_class = models.module(model).Config
    for f in fields(config_class):
        if hasattr(Options, f.name):
            raise UserError(f"models/{model}.py: Config.{f.name} is an option of train.py too: take another name")
    parser = Parser("train.py", description=description, epilog=f"models: {', '.join(models.names())}\n"
                                                                f"presets: {', '.join(presets.PRESETS)}")
    add_options(parser, "training", Options, defaults)
    add_options(parser, f"model {model}", config_class, {"vocab_size": "the data's", **defaults})
    flags = vars(parser.parse_args(argv))
    if asked.resume:
        for key, value in flags.items():
            if key not in MAY_CHANGE and value != defaults.get(key):
                raise UserError(f"--{key} {value} contradicts the run in {asked.resume}, which has "
                                f"{defaults.get(key)}: leave it out")
    flags |= {name: run_folder(flags[name]) for name in ("resume", "init_from") if name in flags}
    chosen, config = pick(Options, {**defaults, **flags}), pick(config_class, {**defaults, **flags})
    if "warmup_steps" not in flags:                                         # the preset's, or as many as there are
        chosen["warmup_steps"] = min(chosen.get(name, getattr(Options, name)) for name in ("warmup_steps", "max_steps"))
    with user_errors():
        options = Options(**chosen)
        if options.sample_every:
            models.cache_class(model)
            if not hasattr(models.module(model).Model, "generate"):
                raise ValueError(f"models/{model}.py has no Model.generate, which --sample_every calls: see gpt.py")
    if asked.resume and "max_steps" in flags and flags["max_steps"] != defaults["max_steps"]:
        check_length(options, replace(options, max_steps=defaults["max_steps"]), checkpoint["step"], constant_until)
    return options, config, flags


def check_length(options, old, step, constant_until):
    """UserError if a run with the options `old`, at this step, cannot go on with other max_steps."""
    run, kept = options.resume, Path(options.resume) / "before_decay"
    falls = min(constant_until(old), constant_until(options))
    if step <= falls:
        return
    whose = "its" if falls == constant_until(old) else "the shorter run's"
    why = "a cosine schedule has one length" if falls < 0 else f"{whose} end begins at step {falls}"
    how = (f"go on with {shell('train.py', '--resume', kept, '--max_steps', options.max_steps)}"
           if kept.exists() and falls == constant_until(old) else f"start a new run with --init_from {run}")
    raise UserError(f"--max_steps {options.max_steps}: {run} is at step {step} of {old.max_steps}, and {why}: {how}")
