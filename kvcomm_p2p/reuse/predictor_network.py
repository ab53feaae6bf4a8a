"""The network behind the prefix predictor, and how one gradient step is made.

An LSTM reads a run in patches of 8 tokens (their mean and maximum); one small head, shared by all tokens, turns the patch's
state, the token and the two before it into a deviation. A head per place in the patch, which was tried first, learned by
heart where in a patch the tokens of its training runs stood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvcomm_p2p.reuse.predictor_features import FEATURES, LOG_POSITION, LOG_SCALE

PATCH_TOKENS = 8
WINDOW_TOKENS = 512
"""The LSTM begins anew every so many tokens: windows run side by side, and a gradient step has a bounded price."""

GRADIENT_NORM_MAX = 1.0

PRIOR = (-1.1, -0.26)
"""ln deviation = PRIOR[0] + PRIOR[1] ln(1 + position in the run): what a fresh network predicts. Fitted to the default model
on copies from behind another role's system prompt or another document."""

_EMBEDDED, _STATE, _CONTEXT, _HIDDEN = 8, 12, 4, 10
_SEED = 7


class DeviationNetwork(nn.Module):
    """Features [B, n, F] -> ln of the deviation [B, n]. A token's prediction depends on tokens up to the end of its patch."""

    def __init__(self) -> None:
        """The same weights every time."""
        super().__init__()
        self.embed = nn.Linear(FEATURES, _EMBEDDED)
        self.patches = nn.LSTM(2 * _EMBEDDED, _STATE, batch_first=True)
        self.context = nn.Linear(_STATE, _CONTEXT)
        self.hidden = nn.Linear(3 * _EMBEDDED + _CONTEXT, _HIDDEN)
        self.out = nn.Linear(_HIDDEN + FEATURES, 1)
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for parameter in self.parameters():
                bound = 1 / math.sqrt(parameter.shape[-1])
                parameter.uniform_(-bound, bound, generator=generator)
            self.out.weight.zero_()
            self.out.weight[0, _HIDDEN + LOG_POSITION] = PRIOR[1] * LOG_SCALE
            self.out.bias.fill_(PRIOR[0])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """As the class says. n need not be a whole number of patches."""
        batch, n, _ = features.shape
        padded = nn.functional.pad(features, (0, 0, 0, -n % PATCH_TOKENS))
        tokens = torch.tanh(self.embed(padded))
        patches = tokens.view(batch, -1, PATCH_TOKENS, _EMBEDDED)
        states, _ = self.patches(torch.cat([patches.mean(dim=2), patches.amax(dim=2)], dim=-1))
        context = self.context(states).repeat_interleave(PATCH_TOKENS, dim=1)
        before = nn.functional.pad(tokens, (0, 0, 2, 0))
        seen = torch.cat([tokens, before[:, 1:-1], before[:, :-2], context], dim=-1)
        ln_deviation: torch.Tensor = self.out(torch.cat([torch.tanh(self.hidden(seen)), padded], dim=-1))
        return ln_deviation[:, :n, 0]


@dataclass(frozen=True, slots=True)
class Window:
    """What was observed in one window of a run: its features [n, F] up to the last patch in which anything was, `rows` int64
    [m] in it, and ln of their deviations [m]."""

    features: torch.Tensor
    rows: torch.Tensor
    ln_deviations: torch.Tensor


def ln_deviations(network: DeviationNetwork, features: torch.Tensor) -> torch.Tensor:
    """[n] from the features [n, F] of a run of any length, window by window."""
    n = features.shape[0]
    if not n:
        return features.new_zeros(0)
    # A short run is one window of its own length.
    length = min(n, WINDOW_TOKENS)
    padded = nn.functional.pad(features, (0, 0, 0, -n % length))
    ln_deviation: torch.Tensor = network(padded.view(-1, length, FEATURES))
    return ln_deviation.flatten()[:n]


def cut_windows(features: torch.Tensor, positions: torch.Tensor, ln_seen: torch.Tensor) -> list[Window]:
    """The observed windows of a run with features [n, F], of which `positions` (int64 [m]) showed `ln_seen` [m]."""
    found = []
    number = positions // WINDOW_TOKENS
    for index in sorted(set(number.tolist())):
        first = index * WINDOW_TOKENS
        rows = positions[number == index] - first
        end = first + (int(rows.max()) // PATCH_TOKENS + 1) * PATCH_TOKENS
        found.append(Window(features[first:end].clone(), rows, ln_seen[number == index]))
    return found


def learn(network: DeviationNetwork, optimizer: torch.optim.Optimizer, windows: Sequence[Window]) -> None:
    """One gradient step on the mean over windows of the mean squared error of ln deviations. Mutates network and optimizer;
    a step whose gradient is not finite is left out."""
    longest = max(len(window.features) for window in windows)
    batch = torch.zeros(len(windows), longest, FEATURES)
    for index, window in enumerate(windows):
        batch[index, : len(window.features)] = window.features
    sizes = torch.tensor([len(window.rows) for window in windows])
    number = torch.repeat_interleave(torch.arange(len(windows)), sizes)
    rows = torch.cat([window.rows for window in windows])
    error = network(batch)[number, rows] - torch.cat([window.ln_deviations for window in windows])
    loss = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none").div(sizes[number]).sum()
    optimizer.zero_grad()
    torch.autograd.backward(loss / len(windows))
    norm = nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_NORM_MAX)
    if bool(torch.isfinite(norm)):
        optimizer.step()
