"""Trains a small GPT on the bytes of this repository's own files, with flashgen's attention or torch's, from the same seed.

    python tests/device/train_gpt.py OUT.json [STEPS] [ATTENTION …]

ATTENTION: flashgen, flashgen-deterministic, sdpa-math, sdpa-flash, sdpa-cudnn. Prints the last loss and tokens per second of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen

ROOT = Path(__file__).resolve().parents[2]
WARM_STEPS = 20  # not timed: compilation, clocks
BLOCK = 10  # steps that are timed as one, ended by a wait; the median of all blocks counts, so that a busy host for a moment does not


@dataclass(frozen=True)
class Config:
    """Sizes of model and training."""

    layers: int = 6
    width: int = 768
    heads: int = 12
    rows: int = 512
    batch: int = 16
    rate: float = 6e-4
    seed: int = 5


CONFIG = Config()


@dataclass(frozen=True)
class Run:
    """What one training gave."""

    losses: list[float]
    tokens_per_s: float


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(name: str) -> Attend:
    """(batch, heads, rows, columns) causal attention by name."""
    if name.startswith("flashgen"):
        deterministic = name.endswith("deterministic") or None
        return lambda q, k, v: flashgen.attention(q, k, v, causal=True, deterministic=deterministic)  # type: ignore[no-any-return]
    backends = {"sdpa-math": SDPBackend.MATH, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backends[name]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        self.before, self.between = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.project, self.merge = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.wide, self.narrow = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = self.project(self.before(x)).view(batch, rows, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.merge(self.attend(q, k, v).transpose(1, 2).reshape(batch, rows, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, config.width), nn.Embedding(config.rows, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.last, self.logits = nn.LayerNorm(config.width), nn.Linear(config.width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last(x))  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def text() -> bytes:
    """The package's own source and documentation."""
    paths = sorted(
        path for folder in ("flashgen", "docs", "templates") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".cuh")
    )
    return b"\n".join(path.read_bytes() for path in paths)


def train(name: str, steps: int, config: Config = CONFIG, device: str = "cuda") -> Run:
    """Losses of every step, and tokens per second, the median of blocks. The same seed gives the same model and batches."""
    torch.manual_seed(config.seed)
    model = Gpt(config, attention(name)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long().to(device)
    choose = torch.Generator().manual_seed(config.seed)
    losses, times, warm = list[Any](), list[float](), min(WARM_STEPS, steps // 2)
    started = time.perf_counter()
    for step in range(steps):
        if step >= warm and (step - warm) % BLOCK == 0:
            _wait(device)
            times.append((time.perf_counter() - started) / BLOCK)  # the first is of the warm steps
            started = time.perf_counter()
        places = torch.randint(len(data) - config.rows - 1, (config.batch,), generator=choose).tolist()
        windows = torch.stack([data[place : place + config.rows + 1] for place in places])
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    _wait(device)
    last = (time.perf_counter() - started) / ((steps - warm - 1) % BLOCK + 1)
    return Run([float(loss) for loss in losses], config.batch * config.rows / median([*times[1:], last]))


def smoothed(losses: list[float], over: int = 20) -> np.ndarray[Any, Any]:
    """Means over `over` steps: single steps differ by their batch's noise."""
    return np.convolve(losses, np.ones(over) / over, mode="valid")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(out: Path, steps: int, names: list[str]) -> None:
    runs = {}
    for name in names:
        run = train(name, steps)
        runs[name] = {"losses": [round(loss, 5) for loss in run.losses], "tokens_per_s": round(run.tokens_per_s)}
        print(f"{name}: last loss {run.losses[-1]:.4f}, {run.tokens_per_s:,.0f} tokens/s", flush=True)
        out.write_text(json.dumps({"config": CONFIG.__dict__, "steps": steps, "runs": runs}, separators=(",", ":")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200, sys.argv[3:] or ["sdpa-math", "sdpa-flash", "flashgen"])
