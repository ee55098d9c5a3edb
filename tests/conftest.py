import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)                # the tests are small; more threads only wait for each other
signal.signal(signal.SIGINT, signal.default_int_handler)    # a background job ignores Ctrl-C, and so would the scripts under test
