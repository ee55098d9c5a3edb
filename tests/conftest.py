"""What all tests share: the option --full, and which tests `-m quick` takes."""
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
sys.path[:0] = map(str, (HERE.parent, HERE / "helpers", RESULTS))
# A background job ignores Ctrl-C, one under nohup SIGHUP, and so would the scripts under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pytest.register_assert_rewrite("analysis", "published", "reference", "settings", "small")

import settings  # noqa: E402
import torch  # noqa: E402
from forked import Scripts  # noqa: E402
from small import data, refused, whole  # noqa: E402, F401

import models  # noqa: E402

torch.set_num_threads(1)            # the tests are small: more threads would only wait

# The marks quick, full and sparse stand at the tests. Besides these, quick are all tests of a user's own model, every
# default setting in test_models.py, and the first case of test_equations of each model.

# With several workers the files that take longest start first, so that all end at about the same time. With one the
# test comes first that says most clearly what is wrong with a model.
LONGEST = ["test_compile", "test_train", "test_endurance", "test_own_model", "test_bench", "test_analyze", "test_eval",
           "test_mistakes"]


@pytest.fixture(scope="session")
def scripts():
    """Runs the repository's scripts quickly: scripts.run("train.py", "--max_steps", 2)."""
    scripts = Scripts()
    yield scripts
    scripts.server.communicate()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also the slow tests: the whole matrix of models and settings")


def pytest_configure(config):
    for name in models.names():
        try:
            models.module(name)
        except ValueError as e:
            pytest.exit(str(e), returncode=pytest.ExitCode.USAGE_ERROR)
    config.option.loadscopereorder = False          # else xdist starts with the files that have the most tests
    config.addinivalue_line("markers", "quick: in less than a minute, for people who hack")
    config.addinivalue_line("markers", "full: slow; runs with --full only")
    config.addinivalue_line("markers", "sparse: over all models; without --full of every twelfth")


def model_of(item):
    """The model that a test is about, or None."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return name if name in models.names() else None


def is_slow(item):
    """Of a sparse test the default run keeps every twelfth model, and a user's own."""
    name = model_of(item)
    kept = name and (name in models.names()[::12] or not settings.belongs(name))
    options = item.path.stem == "test_models" and name and models.path(name).startswith("models/more/") and (
        item.callspec.params.get("options"))
    sparse = item.get_closest_marker("sparse") or options
    return item.get_closest_marker("full") or sparse and not kept


def is_quick(item):
    """Of a sparse test the baseline."""
    name, of_models = model_of(item), item.path.stem == "test_models"
    marked = item.get_closest_marker("quick") and (name == "gpt" or not item.get_closest_marker("sparse"))
    own = name and not settings.belongs(name)
    return own or of_models and not (name and item.callspec.params.get("options")) or marked


def pytest_collection_modifyitems(config, items):
    first = LONGEST if hasattr(config, "workerinput") else ["test_models"]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))
    equations = Counter()               # cases of each model: the first is quick; of models/more/ four are not slow
    for item in items:
        equation = item.name.startswith("test_equations") and model_of(item)
        equations[equation] += 1
        if is_slow(item) or equation and "more/" in models.path(equation) and equations[equation] > 4:
            item.add_marker(pytest.mark.full)
            if not config.getoption("--full"):
                item.add_marker(pytest.mark.skip(reason="slow: --full runs it"))
        elif is_quick(item) or equation and equations[equation] == 1:
            item.add_marker(pytest.mark.quick)
            continue
        item.own_markers = [mark for mark in item.own_markers if mark.name != "quick"]
