"""What all tests share: the option --full, and which tests `-m quick` takes."""
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
sys.path[:0] = map(str, (HERE.parent, HERE / "helpers", RESULTS, RESULTS / "value-gates"))
# A background job ignores Ctrl-C, one under nohup SIGHUP, and so would the scripts under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pytest.register_assert_rewrite("analysis", "endurance", "published", "reference", "settings", "small")

import settings  # noqa: E402
import torch  # noqa: E402
from forked import Scripts  # noqa: E402
from small import data, whole  # noqa: E402, F401

import models  # noqa: E402

torch.set_num_threads(1)            # the tests are small: more threads would only wait

# What `-m quick` takes: whole files, and tests whose names begin so. Besides these: all tests of a user's own model,
# every default setting in test_models.py, and the first case of test_equations in each file.
QUICK = {
    "test_copies": [""], "test_rooms": ["test_no_model", "test_imports"], "test_muon": [""],
    "test_compile": ["test_one_graph_forward_and_backward[gpt-default]", "test_one_graph_to_decode[gpt]"],
    "test_gpt": ["test_initial_values"],
    "test_train": ["test_log_and_run_folder", "test_lr_schedules", "test_every_model_learns_and_resumes[gpt]",
                   "test_what_must_not_change_the_losses", "test_a_few_steps_are_all_warm_up"],
    "test_shards": [""], "test_tokenizers": ["test_tokenizers"], "test_texts": ["test_documents"],
}

# What only --full runs. Of a test over all models the default run keeps every twelfth model, and a user's own.
SLOW = {
    "test_bench": ["test_compiled", "test_a_full_disk"],
    "test_compile": ["test_one_graph"],
    "test_kern": ["test_a_mixture_compiles"],
    "test_models": ["test_the_final_norm_is_one", "test_generate"],
    "test_rooms": ["test_every_module_can_be_imported_first"],
    "test_endurance": ["test_ranks", "test_fuzz", "test_a_lost_rank"],
    "test_features": ["test_the_autoencoder"],
    "test_mhar": ["test_equations[n_depth_head=32"],
    "test_notebook": ["test_the_cells_run"],
    "test_train": ["test_a_model_file_runs_alone", "test_every_model_learns_and_resumes", "test_deterministic",
                   "test_signal_saves_and_resume_is_exact[15"],
    "test_sample": ["test_a_reader_that"],
    "test_eval": ["test_generate_until", "test_loglikelihood"],
}

# With several workers the files that take longest start first, so that all end at about the same time. With one the
# test comes first that says most clearly what is wrong with a model.
LONGEST = ["test_compile", "test_train", "test_endurance", "test_own_model", "test_bench", "test_analyze", "test_eval",
           "test_mistakes"]


@pytest.fixture(scope="session")
def scripts():
    """Runs the repository's scripts quickly: scripts.run("train.py", "--max_steps", 2)."""
    with Scripts() as scripts:
        yield scripts


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


def model_of(item):
    """The model that a test is about, or None."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return name if name in models.names() else None


def begins(item, table):
    return any(item.name.startswith(begin) for begin in table.get(item.path.stem, ()))


def is_slow(item):
    """Also generic tests of the options of models/more/."""
    name = model_of(item)
    kept = name and (name in models.names()[::12] or not settings.belongs(name))
    options = item.path.stem == "test_models" and name and models.path(name).startswith("models/more/") and (
        item.callspec.params.get("options"))
    return item.get_closest_marker("full") or (options or begins(item, SLOW)) and not kept


def is_quick(item):
    name, of_models = model_of(item), item.path.stem == "test_models"
    own = name and not settings.belongs(name)
    return own or of_models and not (name and item.callspec.params.get("options")) or begins(item, QUICK)


def pytest_collection_modifyitems(config, items):
    first = LONGEST if hasattr(config, "workerinput") else ["test_models"]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))
    equations = Counter()               # cases of each file: the first is quick; of models/more/ four are not slow
    for item in items:
        equation = item.name.startswith("test_equations")
        equations[item.path] += equation
        more = (models.HERE / "more" / f"{item.path.stem.removeprefix('test_')}.py").exists()
        if is_slow(item) or equation and more and equations[item.path] > 4:
            item.add_marker(pytest.mark.full)
            if not config.getoption("--full"):
                item.add_marker(pytest.mark.skip(reason="slow: --full runs it"))
        elif is_quick(item) or equation and equations[item.path] == 1:
            item.add_marker(pytest.mark.quick)
