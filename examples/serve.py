"""Answer requests without an optimizer: etloom collect --out run/ --step-name ^decode -- python examples/serve.py"""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import record_function


def main() -> None:
    torch.manual_seed(0)
    model = nn.GRU(16, 16, batch_first=True).eval()
    with torch.inference_mode():
        for request in range(8):
            with record_function(f"decode {request}"):
                answer, _ = model(torch.randn(2, 5, 16))
            print(f"request {request} gave {tuple(answer.shape)}")


if __name__ == "__main__":
    main()
