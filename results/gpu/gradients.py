"""Are the gradients of compiled models right on this device? python results/gpu/gradients.py [MODEL ...]

At the study's shape, with random weights: the largest relative error of a parameter's gradient in fp32, compiled on
this device, against eager float64 on the CPU. With TF32 products, as train.py has them on a GPU, and without.
"""
import copy
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP))
import torch  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth.devices import find_device  # noqa: E402


def gradients(model, idx, targets):
    model(idx, targets)[1].backward()
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


def main(names):
    device = find_device()
    for name in names or sorted(path.stem for path in TOP.glob("models/[a-z]*.py")):
        _, config, _ = train.parse(["--model", name, "--preset", "study"])
        torch.manual_seed(0)
        model = models.build(name, **{**config, "vocab_size": 4096})
        with torch.no_grad():
            for p in model.parameters():                                # else zero weights hide gradients
                p.add_(torch.randn_like(p) * 0.02)
        idx, targets = torch.randint(4096, (2, 4, 256))
        right, cells = gradients(copy.deepcopy(model).double(), idx, targets), []
        for precision in ("high", "highest"):                           # TF32, fp32
            torch.set_float32_matmul_precision(precision)
            torch.compiler.reset()
            compiled = copy.deepcopy(model).to(device)
            compiled.compile(dynamic=False)
            found = gradients(compiled, idx.to(device), targets.to(device))
            errors = {key: ((g - right[key]).norm() / right[key].norm()).item() for key, g in found.items()
                      if right[key].norm() > 0}
            worst = max(errors, key=errors.get)
            cells.append(f"{precision} {errors[worst]:.1e} ({worst})")
        print(f"{name}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
