"""The device of a run, what it can do, and the processes that share the work."""
import math
import os
import platform
import random
import resource
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from nanodepth.cli import UserError, one_line


def find_device(name="auto"):
    """The torch device `name`; "auto": cuda if there is one, else cpu. UserError if it cannot be used."""
    try:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        one = torch.zeros(1, device=name, dtype=torch.float64)              # losses are summed in it: not on "mps"
        one.item()                                                          # not on "meta"
        return one.device                                                   # cuda gets its index
    except (RuntimeError, AssertionError, TypeError) as e:
        raise UserError(f"--device {name} cannot be used: {one_line(e).split('. ')[0]}") from None


def choose_dtype(device, dtype):
    """The dtype of a run, "bf16" or "fp32"; "auto" is bf16 if the chip multiplies it natively: else fp32 may be faster.

    With fp32, a GPU may use TF32. With bf16 it may not: what a model then still computes in fp32 needs the precision.
    """
    if dtype == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            chip = torch.cpu.get_capabilities()
            native = device.type == "cpu" and any(chip.get(name) for name in ("avx512_bf16", "amx_bf16"))
        dtype = "bf16" if native else "fp32"
    if dtype == "fp32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return dtype


def autocast(device, dtype):
    """The context of forward passes: autocast over fp32 weights for the dtype "bf16", else nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16")


def compile_model(model):
    """Compiles a model for fixed shapes: as a whole, or its compiled_parts one by one, and its output. State-dict keys
    stay.
    """
    if not (name := getattr(model, "compiled_parts", None)):
        return model.compile(dynamic=False)
    how = dict(dynamic=False, options={"triton.cudagraphs": False})     # the next part's graph would overwrite this one
    for part in getattr(model, name):
        part.compile(**how)
    model.output = torch.compile(model.output, **how)                   # eager, the loss moves six times as many bytes


def seed_generators(seed):
    """Seeds every generator that a model's file may draw from. Only torch's go on in a run that is resumed."""
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    torch.manual_seed(seed)


def random_state():
    """The state of torch's generators in this process, which dropout draws from."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state, device):
    """Sets what random_state() returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def processor():
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []                  # only on Linux
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def in_words(device):
    """The device as a line says it: a GPU's name, and how much of its memory is free."""
    if device.type != "cuda":
        return str(device)
    free, total = (n / 2 ** 30 for n in torch.cuda.mem_get_info(device))
    return f"{device}, {torch.cuda.get_device_name(device)}, {free:.1f} of {total:.1f} GiB free"


def peak_flops(device):
    """Dense bf16 FLOP/s from the vendor's data sheet, or None for a chip that is not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # None where the name holds that of a faster chip
    table = {"Laptop": None, "MIG": None, "4090 D": None, "H200 NVL": None, "H200": 989e12, "H100 PCIe": 756e12,
             "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
    return next((peak for chip, peak in table.items() if chip in name), None)


def flops_per_token(model, T):
    """Forward FLOPs per token at T tokens of context: matrix products and attention, by torch's counter.

    Takes no memory or arithmetic. NaN, and a line, for a model that looks at its numbers (`.item()`).
    """
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            copy, idx = type(model)(model.config).eval(), torch.zeros(1, T, dtype=torch.long)
        # autocast does not know the device "meta", nor the counter the CPU's own attention
        with (FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH),
              patch("torch.is_autocast_enabled", lambda *_: False)):
            copy(idx)
    except RuntimeError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"FLOPs are not counted: {type(model).__module__} does not run on torch's device \"meta\" "
                  f"({one_line(e)[:200]})", file=sys.stderr)
        return math.nan
    return counter.get_total_flops() / T


def peak_bytes(device):
    """Peak memory so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Ranks:
    """This process among those that torchrun started; without torchrun it is the only one.

    rank: its number, from 0; world: number of processes; parallel: whether torchrun started it, even if alone; device:
    its device; deterministic: from now on the same program gives the same bits, also on a GPU. UserError for an
    unusable device, and if a part of torchrun's environment is missing.
    """

    def __init__(self, device="auto", deterministic=False):
        if deterministic:                       # before anything uses the GPU; an operation that cannot: RuntimeError
            from torch._inductor import config
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
            config.deterministic = True                                     # kernels are not chosen by timing them
        self.rank, self.world, self.parallel = 0, 1, "RANK" in os.environ
        if not self.parallel and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise UserError("srun has started several copies of train.py, which know nothing of each other: let srun "
                            "start one torchrun per node (--ntasks-per-node 1), see docs/many-gpus.md")
        if self.parallel:
            if missing := {"LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
                raise UserError(f"RANK is set in the environment but {min(missing)} is not: start train.py with "
                                "torchrun, or unset RANK")
            if device == "auto" and torch.cuda.is_available() or device.startswith("cuda"):
                device = f"cuda:{os.environ['LOCAL_RANK']}"
        self.device = find_device(device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        if self.parallel:
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None,
                                    timeout=timedelta(hours=1))             # while the first rank writes a checkpoint
            self.world, self.rank = dist.get_world_size(), dist.get_rank()

    def say(self, text):
        """Prints a line from the first rank. The run goes on even if nobody reads stdout any more."""
        if text and self.rank == 0:
            try:
                print(text, flush=True)
            except OSError:                                                 # a closed pipe or terminal
                sys.stdout = open(os.devnull, "w")

    def wrap(self, model):
        """The model; under torchrun, in DDP, which averages the gradients over the ranks."""
        if not self.parallel:
            return model
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == "cuda" else None,
                                       gradient_as_bucket_view=True)        # one copy of gradients

    def sum(self, tensor):
        """Adds up a tensor over the ranks, in place."""
        if self.parallel:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value):
        """[the value of each rank], on every rank."""
        values = [value] * self.world
        if self.parallel:
            dist.all_gather_object(values, value)
        return values

    def share(self, value):
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]


def leave_together(code):
    """Returns the exit code. Under torchrun, instead waits for the other ranks and ends the process with that code.

    (Tearing down gloo can abort if another rank has left already.)
    """
    if dist.is_initialized():
        dist.barrier()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()
        sys.stdout.flush()
        os._exit(code)
    return code
