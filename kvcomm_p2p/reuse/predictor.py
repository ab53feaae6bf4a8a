"""The prefix predictor: how wrong aligned KV will be, token by token, before anything is computed.

It learns from what the guard sees when tokens are recomputed anyway; until then it predicts a plain fall with the position
in the run, by which "first k" is chosen. Recomputed tokens are not a fair sample: a predictor that only ever sees the tokens
it chose learns nothing of the others. The engine's evenly spaced probes are what keeps it honest; without them, recompute a
few tokens elsewhere from time to time.
"""

from __future__ import annotations

import copy
import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvcomm_p2p.protocol.ids import ModelId
from kvcomm_p2p.reuse.predictor_features import FEATURES
from kvcomm_p2p.reuse.predictor_network import PRIOR, DeviationNetwork, Window, cut_windows, learn, ln_deviations

SCHEMA = 1
"""Of the file, and with it of features and network: raise it when any of them changes its meaning."""

DEVIATION_MIN, DEVIATION_MAX = 1e-4, 10.0
"""Smaller deviations are rounding; larger ones count as this."""

LEARNING_RATE = 8e-3
REPLAY_WINDOWS_MAX = 128
REPLAYED_WINDOWS = 3
"""Old windows that are learned from again in each gradient step."""

SKILL_OBSERVATIONS_MIN = 8
SKILL_MEMORY_OBSERVATIONS = 128
"""An error counts 1/e in `skill` after so many more observations."""

FILE_BYTES_MAX = 1 << 20

_RECORDED = ("bucket_means", "bucket_weights", "errors")

_SEED = 7
_BUCKETS = 16
_BUCKET_WEIGHT_MAX = 1000.0
"""Tokens after which a bucket's mean forgets."""


class _Record:
    """How well observations were predicted before they were learned from, beside a running mean per position bucket."""

    def __init__(self) -> None:
        middles = 1.5 * torch.exp2(torch.arange(_BUCKETS, dtype=torch.float32))
        self.bucket_means = PRIOR[0] + PRIOR[1] * middles.log()
        self.bucket_weights = torch.ones(_BUCKETS)
        self.errors = torch.zeros(4)
        self.observations = 0

    def add(self, positions: torch.Tensor, predicted: torch.Tensor, observed: torch.Tensor) -> None:
        """All [m]; `predicted` and `observed` are ln deviations."""
        buckets = torch.log2(1 + positions.float()).long().clamp_max(_BUCKETS - 1)
        misses = torch.stack([predicted - observed, self.bucket_means[buckets] - observed])
        shape = misses - misses.mean(dim=1, keepdim=True)
        errors = torch.cat([misses.pow(2).mean(dim=1), shape.pow(2).mean(dim=1)])
        self.errors = self.errors * math.exp(-1 / SKILL_MEMORY_OBSERVATIONS) + errors
        counts = torch.bincount(buckets, minlength=_BUCKETS).float()
        sums = torch.zeros(_BUCKETS).index_add_(0, buckets, observed)
        weights = self.bucket_weights + counts
        self.bucket_means = (self.bucket_means * self.bucket_weights + sums) / weights
        self.bucket_weights = weights.clamp_max(_BUCKET_WEIGHT_MAX)
        self.observations += 1

    def skill(self, *, shape: bool) -> float | None:
        if self.observations < SKILL_OBSERVATIONS_MIN:
            return None
        ours, baseline = self.errors[2 * shape : 2 * shape + 2].tolist()
        return 1 - ours / baseline if baseline > 0 else 0.0


class Predictor:
    """Learns online. Thread safe; `predict` never waits for `observe`. Tensors are float32 on the CPU."""

    def __init__(self) -> None:
        """A fresh one, the same every time."""
        self._record = _Record()
        self._random = random.Random(_SEED)
        self._replay: list[Window] = []
        self._lock = threading.Lock()
        self._refused = 0
        # Weights made under a caller's inference mode could never be learned.
        with torch.inference_mode(False):
            self._network = DeviationNetwork()
            self._optimizer = torch.optim.Adam(self._network.parameters(), LEARNING_RATE, fused=True)
            self._serving = _frozen(self._network)

    @property
    def observations(self) -> int:
        """How many were learned from, before the last save too."""
        return self._record.observations

    @property
    def refused(self) -> int:
        """Observations that were not finite or negative."""
        return self._refused

    @property
    def skill(self) -> float | None:
        """1 - mean squared error over that of a running mean per position bucket (powers of two), of ln deviations, on each
        observation before it was learned from; recent ones count more. Above 0 it is better than knowing the position.
        None after fewer than SKILL_OBSERVATIONS_MIN observations."""
        return self._record.skill(shape=False)

    @property
    def shape_skill(self) -> float | None:
        """Like `skill`, with the mean error of each observation taken out of both: whether it knows *which* tokens of a run
        deviate most. That is what choosing tokens needs; predicting the divergence needs the level, too."""
        return self._record.skill(shape=True)

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Deviations [n] >= 0 of a run's tokens from their features [n, F] (`predictor_features.features`).

        Mutates nothing. Raises ValueError for another shape.
        """
        _check_features(features)
        with torch.no_grad():
            ln = ln_deviations(self._serving, features)
            return ln.clamp(math.log(DEVIATION_MIN), math.log(DEVIATION_MAX)).exp()

    def observe(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        deviations: torch.Tensor,
        *,
        seconds: float = 0.005,
        steps_max: int = 3,
    ) -> bool:
        """Learn from the deviations [m] that recomputing showed at `positions` (int64 [m], from the run's beginning) of a run
        with features [n, F].

        At least one gradient step, further ones (at most `steps_max`) only as long as they fit into `seconds`; not for the
        way to a first token. Returns False, having learned nothing, if there are no positions or if anything is not finite
        or a deviation negative, which `refused` counts. Raises ValueError for shapes that do not fit and for positions
        outside the run.
        """
        deadline = time.perf_counter() + seconds
        _check_features(features)
        if positions.ndim != 1 or positions.shape != deviations.shape or positions.dtype != torch.int64:
            raise ValueError("positions must be int64 [m], deviations [m]")
        if not len(positions):
            return False
        if int(positions.min()) < 0 or int(positions.max()) >= len(features):
            raise ValueError(f"positions must lie in [0, n = {len(features)})")
        # Cloned outside inference mode: what was made within it cannot take part in a backward pass.
        with torch.inference_mode(False), self._lock:
            x, rows, seen = features.detach().clone(), positions.clone(), deviations.detach().float().clone()
            if not bool(torch.isfinite(x).all() & torch.isfinite(seen).all() & (seen >= 0).all()):
                self._refused += 1
                return False
            ln_seen = seen.clamp(DEVIATION_MIN, DEVIATION_MAX).log()
            with torch.no_grad():
                self._record.add(rows, ln_deviations(self._network, x)[rows], ln_seen)
            self._learn(cut_windows(x, rows, ln_seen), deadline, steps_max)
            self._serving = _frozen(self._network)
        return True

    def save(self, path: Path, model_id: ModelId) -> None:
        """Write weights, what is known about skill, and whose KV it learned from; replaces the file atomically. Nothing of what
        was observed is in it. Raises OSError."""
        with self._lock:
            tensors = {f"network.{name}": value.detach().clone() for name, value in self._network.state_dict().items()}
            tensors |= {f"record.{name}": getattr(self._record, name).clone() for name in _RECORDED}
            observations = self._record.observations
        metadata = {"schema": str(SCHEMA), "model_id": model_id.hex(), "observations": str(observations)}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two writers must not share a partial file.
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            partial.write_bytes(save(tensors, metadata))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, model_id: ModelId) -> tuple[Predictor, str]:
        """The predictor saved for this model and "", or a fresh one and the reason. Never raises for a bad file."""
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                return cls(), f"{path} is larger than any predictor"
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            return cls(), f"there is no {path} yet"
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            return cls(), f"{path} cannot be read ({error})"
        predictor = cls()
        refusal = _refusal(metadata, tensors, predictor, model_id)
        if refusal:
            return predictor, f"{path} {refusal}"
        with torch.inference_mode(False):
            weights = {name: tensors[f"network.{name}"] for name in predictor._network.state_dict()}
            predictor._network.load_state_dict(weights)
            predictor._serving = _frozen(predictor._network)
        for name in _RECORDED:
            setattr(predictor._record, name, tensors[f"record.{name}"])
        predictor._record.observations = int(metadata["observations"])
        return predictor, ""

    def _learn(self, new: list[Window], deadline: float, steps_max: int) -> None:
        with torch.enable_grad():
            for _ in range(max(1, steps_max)):
                started = time.perf_counter()
                old = self._random.sample(self._replay, min(REPLAYED_WINDOWS, len(self._replay)))
                learn(self._network, self._optimizer, [self._random.choice(new), *old])
                now = time.perf_counter()
                if now + (now - started) > deadline:
                    break
        for window in new:
            if len(self._replay) < REPLAY_WINDOWS_MAX:
                self._replay.append(window)
            else:
                self._replay[self._random.randrange(REPLAY_WINDOWS_MAX)] = window


def _refusal(
    metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], fresh: Predictor, model_id: ModelId
) -> str:
    """Why a file's content cannot become a predictor of this model, or ""."""
    if metadata.get("schema") != str(SCHEMA):
        return f"has schema {metadata.get('schema')}, not {SCHEMA}"
    if metadata.get("model_id") != model_id.hex():
        return f"is for model {metadata.get('model_id')}, not {model_id.hex()}"
    if not re.fullmatch(r"[0-9]{1,18}", metadata.get("observations", "")):
        return "does not say how many observations it has seen"
    expected = {f"network.{name}": value for name, value in fresh._network.state_dict().items()}
    expected |= {f"record.{name}": getattr(fresh._record, name) for name in _RECORDED}
    if tensors.keys() != expected.keys():
        return "does not hold the tensors of a predictor"
    for name, value in sorted(expected.items()):
        if tensors[name].shape != value.shape or tensors[name].dtype != value.dtype:
            return f"has a {name} of another shape"
        if not bool(torch.isfinite(tensors[name]).all()):
            return f"has a {name} that is not finite"
    return ""


def _frozen(network: DeviationNetwork) -> DeviationNetwork:
    """A copy that learning does not change."""
    frozen = copy.deepcopy(network).requires_grad_(False)
    frozen.patches.flatten_parameters()
    return frozen.eval()


def _check_features(features: torch.Tensor) -> None:
    if features.ndim != 2 or features.shape[1] != FEATURES or features.dtype != torch.float32:
        raise ValueError(f"features must be float32 [n, {FEATURES}], not {features.dtype} {tuple(features.shape)}")
