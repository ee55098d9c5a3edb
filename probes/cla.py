"""Probes of cla.py."""


def neutral(model):
    """Nothing to set. ValueError for options with which it never equals the baseline."""
    if model.config.share > 1:
        raise ValueError("gpt.py has no layers without keys and values")
