"""The worker of PyTorch: GPT-2 trained in nanoGPT's way, and the model of `lm` in the same way.

nanoGPT's way: torch.compile of the model, autocast to bfloat16, scaled_dot_product_attention, whole logits, gradients
summed over microbatches, a clipped norm, and the fused AdamW. The code is our own.
"""

import contextlib
import math
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.gpu.peers.turns import Batch, Column, Shape, describe, read_clock, serve

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BACKENDS = {'flash': SDPBackend.FLASH_ATTENTION, 'cudnn': SDPBackend.CUDNN_ATTENTION}


def attend(x: torch.Tensor, heads: int, angles: Any = None) -> torch.Tensor:
    """Computes causal attention from queries, keys and values side by side, [B, L, 3 D]; D is the width of a layer."""
    batch, length, _ = x.shape
    q, k, v = (y.view(batch, length, heads, -1).transpose(1, 2) for y in x.chunk(3, dim=-1))
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, length, -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (c, c + C/2) of each head of C numbers."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Layer(nn.Module):
    """One layer: of GPT-2, or with gated linear units and rotary positions."""

    def __init__(self, shape: Shape, gated: bool):
        super().__init__()
        width, inner = shape.width, shape.heads * shape.head_dim
        hidden = 2 * shape.hidden if gated else 4 * width
        self.heads, self.gated = shape.heads, gated
        self.norm, self.mlp_norm = nn.LayerNorm(width, bias=gated), nn.LayerNorm(width, bias=gated)
        self.qkv, self.out = nn.Linear(width, 3 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.mlp_in = nn.Linear(width, hidden, bias=False)
        self.mlp_out = nn.Linear(shape.hidden if gated else hidden, width, bias=False)

    def forward(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        x = x + self.out(attend(self.qkv(self.norm(x)), self.heads, angles))
        y = self.mlp_in(self.mlp_norm(x))
        if self.gated:
            value, gate = y.chunk(2, dim=-1)
            return x + self.mlp_out(value * functional.gelu(gate, approximate='tanh'))
        return x + self.mlp_out(functional.gelu(y))


class Model(nn.Module):
    """A language model with tied embeddings: GPT-2 with learned positions, or the model of `lm`."""

    def __init__(self, shape: Shape, context: int, gated: bool):
        super().__init__()
        self.gated, self.width = gated, shape.width
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if gated else nn.Embedding(context, shape.width)
        self.layers = nn.ModuleList([Layer(shape, gated) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width, bias=gated)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=shape.width**-0.5 if gated else 0.02)
        if gated:
            nn.init.constant_(self.norm.weight, 0.5)  # a tied head gives first logits a smaller loss with it
            turns = waves(context, shape.head_dim)
            self.register_buffer('cos', turns.cos(), persistent=False)
            self.register_buffer('sin', turns.sin(), persistent=False)
            turns = waves(context, shape.width)
            self.register_buffer('sinusoids', torch.cat([turns.sin(), turns.cos()], dim=-1), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is None:
            x, angles = x * math.sqrt(self.width) + self.sinusoids, (self.cos, self.sin)
            if DEVICE == 'cuda':
                x = x.bfloat16()  # as in `lm`, and unlike nanoGPT, the residual stream is bfloat16
                angles = self.cos.bfloat16(), self.sin.bfloat16()
        else:
            x, angles = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device)), None
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def waves(length: int, width: int) -> torch.Tensor:
    """Returns the angles of positions, [length, width / 2]."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.arange(length)[:, None] * frequencies


class TorchStep:
    """A training step."""

    def __init__(self, column: Column, batch: Batch):
        assert column.shape is not None
        torch.manual_seed(0)
        self._backend = column.attention
        before = allocated()
        model = Model(column.shape, batch.context, gated=column.kind == 'lm_in_torch').to(DEVICE)
        self._parameters = list(model.parameters())
        self.parameters = sum(p.numel() for p in self._parameters)
        decayed = [p for p in self._parameters if p.ndim > 1]
        others = [p for p in self._parameters if p.ndim < 2]
        groups = [{'params': decayed, 'weight_decay': 0.1}, {'params': others, 'weight_decay': 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        self._model = torch.compile(model, dynamic=False)
        rows = batch.rows(column.microbatch_tokens)
        self.microbatches = batch.tokens // batch.context // rows
        size = (self.microbatches, rows, batch.context + 1)
        self._tokens = torch.randint(column.shape.vocabulary, size, device=DEVICE)
        self.first_loss = self.run(1)  # compiles, and makes the moments
        self._own = allocated() - before

    def run(self, steps: int) -> float:
        """Runs the steps; returns the loss of the last one."""
        for _ in range(steps):
            total = torch.zeros((), device=DEVICE)
            for tokens in self._tokens:
                with self._settings():
                    loss = self._model(tokens[:, :-1], tokens[:, 1:].contiguous()) / self.microbatches
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return total.item()

    def peak_gib(self) -> float | None:
        """Runs a step; returns its peak memory, without the states of other steps."""
        if DEVICE == 'cpu':
            return None
        torch.cuda.reset_peak_memory_stats()
        others = allocated() - self._own
        self.run(1)
        return (torch.cuda.max_memory_allocated() - others) / 2**30

    @contextlib.contextmanager
    def _settings(self) -> Any:
        if DEVICE == 'cpu':
            yield
            return
        with torch.autocast('cuda', torch.bfloat16), sdpa_kernel(BACKENDS[self._backend]):
            yield


def allocated() -> int:
    """Returns the bytes of tensors on the device."""
    return torch.cuda.memory_allocated() if DEVICE == 'cuda' else 0


def main() -> None:
    torch.set_float32_matmul_precision('high')
    steps: dict[str, TorchStep] = {}

    def build(columns: list[dict[str, Any]], batch: dict[str, int], run: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for column in map(Column.read, columns):
            begun = time.perf_counter()
            try:
                step = steps[column.name] = TorchStep(column, Batch(**batch))
                found[column.name] = {
                    'compile_seconds': time.perf_counter() - begun,
                    'parameters': step.parameters,
                    'microbatches': step.microbatches,
                    'peak_gib': step.peak_gib() if run else None,
                }
            except Exception as error:
                found[column.name] = {'error': describe(error)}
            if DEVICE == 'cuda':
                torch.cuda.empty_cache()
        return found

    def measure(name: str, n: int) -> dict[str, Any]:
        steps[name].run(1)
        begun = read_clock(DEVICE)
        steps[name].run(n)
        return {'seconds': (read_clock(DEVICE) - begun) / n, 'loss': steps[name].first_loss}

    def machine() -> dict[str, Any]:
        device = torch.cuda.get_device_name() if DEVICE == 'cuda' else 'cpu'
        return {'device': device, 'torch': torch.__version__}

    serve({'build': build, 'measure': measure, 'machine': machine})


if __name__ == '__main__':
    main()
