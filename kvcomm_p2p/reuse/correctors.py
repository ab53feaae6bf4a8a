"""Three ways to correct aligned KV without recomputing it: two from remembered deviations, one from probes.

`kvcomm_average` averages deviations position by position (KVCOMM, arXiv 2510.12872, as its code does it).
`nearest_tokens` averages those of the tokens that are most alike, wherever they stood. `ProbeShift` needs no memory: the
tokens of a run that are recomputed anyway show by how much the others are off. Which one is used where is measured:
docs/decisions/0013-deviations.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm_p2p.kernels.residual_shift import residual_shift, row_angles
from kvcomm_p2p.model.spec import RotaryGeometry
from kvcomm_p2p.reuse.deviations import Deviation, distances, features, rotary_frequencies

NEIGHBOURS = 16
TEMPERATURE = 0.2
"""Of the softmax over neighbours' distances: half the error of one neighbour, and better than a plain mean of 8."""
DISTANCE_MAX = 1.0
"""Tokens that are less alike than this to everything remembered are left alone: a mean correlation of 0.5."""

_CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Correction:
    """What was done to n aligned tokens. `corrected` bool [n]; `distance` float32 [n] to what is most alike in memory (inf
    without any); `shares`: per candidate, how many tokens it corrected, for `DeviationMemory.credit`."""

    corrected: torch.Tensor
    distance: torch.Tensor
    shares: tuple[float, ...]


def kvcomm_average(
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    candidates: Sequence[Deviation],
    rotary: RotaryGeometry | None,
) -> Correction:
    """KVCOMM's: token i is corrected by the softmax-weighted mean of all candidates' deviations at *their* token i, weights
    softmax(-mean|x - a|), candidates at least as long as the run.

    `keys` [L, H, n, Dk] and `values` [L, H, n, Dv]: aligned KV at positions start, start + 1, ...; mutated in place but
    for layer 0. No candidate that long: nothing is corrected. Unlike KVCOMM's code it compares `features` instead of
    all of the KV (either way its weights are almost uniform), and adds deviations of keys turned to where the tokens
    are.
    """
    tokens = keys.shape[2]
    long = [index for index, candidate in enumerate(candidates) if candidate.tokens >= tokens]
    if not long or not tokens:
        return _nothing(keys, len(candidates))
    query = features(keys, values, rotary)
    stored = [candidates[index].features[:tokens].to(query.device, torch.float32) for index in long]
    away = torch.stack([(query - one).abs().mean(dim=1) for one in stored])
    weights = torch.softmax(-away, dim=0)
    for first in range(0, tokens, _CHUNK_TOKENS):
        rows = slice(first, min(first + _CHUNK_TOKENS, tokens))
        shifts = []
        for part in ("keys", "values"):
            chosen = [getattr(candidates[index], part)[:, :, rows].to(keys.device, torch.float32) for index in long]
            shifts.append(
                sum(
                    (weight[rows, None] * one for weight, one in zip(weights, chosen, strict=True)),
                    torch.zeros_like(chosen[0]),
                )
            )
        _add(keys[:, :, rows], values[:, :, rows], shifts, start + first, rotary, None)
    shares = [0.0] * len(candidates)
    for index, share in zip(long, weights.sum(dim=1).tolist(), strict=True):
        shares[index] = share
    nearest = torch.stack([(query - one).pow(2).mean(dim=1).sqrt() for one in stored]).amin(dim=0)
    return Correction(torch.ones(tokens, dtype=torch.bool, device=keys.device), nearest, tuple(shares))


def nearest_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    candidates: Sequence[Deviation],
    rotary: RotaryGeometry | None,
    *,
    distance_max: float = DISTANCE_MAX,
    neighbours: int = NEIGHBOURS,
) -> Correction:
    """Every token is corrected by the deviations of the `neighbours` remembered tokens with the nearest `features`, at any
    position of candidates of any length, weighted by softmax(-distance / TEMPERATURE).

    `keys` [L, H, n, Dk] and `values` [L, H, n, Dv]: aligned KV at positions start, start + 1, ...; mutated in place but
    for layer 0. A token farther than `distance_max` (root mean square of features, in [0, 2]) from all remembered ones
    is left alone, bit for bit: the bound is absolute, a stranger stays one however few others there are.
    """
    tokens = keys.shape[2]
    if not candidates or not tokens:
        return _nothing(keys, len(candidates))
    stored = torch.cat([candidate.features.to(keys.device, torch.float32) for candidate in candidates])
    distance, index = distances(features(keys, values, rotary), stored).topk(
        min(neighbours, len(stored)), dim=1, largest=False
    )
    near = distance[:, 0] <= distance_max
    weights = torch.softmax(-distance / TEMPERATURE, dim=1) * near[:, None]
    for first in range(0, tokens, _CHUNK_TOKENS):
        rows = slice(first, min(first + _CHUNK_TOKENS, tokens))
        if not bool(near[rows].any()):
            continue
        shifts = [_gather(candidates, part, index[rows], weights[rows]) for part in ("keys", "values")]
        skip = None if bool(near[rows].all()) else ~near[rows]
        _add(keys[:, :, rows], values[:, :, rows], shifts, start + first, rotary, skip)
    ends = torch.tensor([candidate.tokens for candidate in candidates], device=keys.device).cumsum(0)
    owner = torch.searchsorted(ends, index, right=True).flatten()
    shares = torch.zeros(len(candidates), device=keys.device).index_add_(0, owner, weights.flatten())
    return Correction(near, distance[:, 0], tuple(shares.tolist()))


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """A reused run, rows [start, end) of the slab, whose head [start, head_end) and `probes` are recomputed.

    `probes`: rows in [head_end, end), ascending, evenly spaced so that their mean is that of all. The head is another
    population (it saw another beginning) and counts for nothing here.
    """

    start: int
    end: int
    head_end: int
    probes: tuple[int, ...]


class ProbeShift:
    """Within a forward, layer by layer: moves what is not recomputed of each run by the mean of what its probes were off by.

    Per layer, kv-head, keys and values, the mean residual mu of the probes (that of keys in one frame) is shrunk by
    alpha = clip(sum_i r_i . mu_-i / sum_i |mu_-i|^2, 0, 1), mu_-i the mean without probe i: the coefficient with which
    the other probes predict one best. Where probes disagree it is 0 and nothing moves. For one forward; not thread safe.
    """

    def __init__(
        self, runs: Sequence[ShiftRun], rotary: RotaryGeometry | None, device: torch.device | str = "cpu"
    ) -> None:
        """`device`: that of the slab. Raises ValueError for a probe outside its run's [head_end, end)."""
        for run in runs:
            if any(not run.head_end <= row < run.end for row in run.probes):
                raise ValueError(f"probes of the run [{run.start}, {run.end}) must lie in [{run.head_end}, {run.end})")
        self._runs = tuple(runs)
        self._rotary = rotary
        self._swapped = rotary is not None and rotary.in_values
        self._interleaved = rotary is not None and rotary.interleaved
        counts = [len(run.probes) for run in runs]
        with torch.inference_mode(False):
            rows = [row for run in runs for row in run.probes]
            self._probes = torch.tensor(rows, dtype=torch.int64, device=device)
            self._counts = torch.tensor(counts, dtype=torch.float32, device=device)[:, None]
            # [runs, probes], 1 where a probe is of a run: sums by run become one product for all runs.
            of_run = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(counts, dtype=torch.int64))
            self._of_run = (of_run[None] == torch.arange(len(runs))[:, None]).float().to(device)
            # Block by block: sums of rows that are sums by run already, of errors, of true rows.
            parts = (torch.eye(len(runs), device=device), self._of_run, self._of_run)
            self._sums = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
        self._halves: torch.Tensor | None = None
        self._angles: dict[tuple[float, ...], _Angles] = {}
        self._among: torch.Tensor | None = None
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """Before the rows `positions` (int64 [R], ascending, all probes among them) of one layer's `keys` [H, T, Dk] and
        `values` [H, T, Dv] are overwritten by `new_keys` [H, R, Dk] and `new_values` [H, R, Dv].

        Shifts rows [head_end, end) of every run in place, also those that are about to be overwritten. Layer 0 is left
        alone. Raises ValueError when a probe is not among `positions`.
        """
        if layer == 0 or not self._probes.shape[0]:
            return
        if self._among is None:
            self._among = _find(positions, self._probes)
        turned, kept, new_turned, new_kept = keys, values, new_keys, new_values
        if self._swapped:
            turned, kept, new_turned, new_kept = values, keys, new_values, new_keys
        angles = self._angles_of(layer)
        true = torch.cat((new_turned.index_select(1, self._among), new_kept.index_select(1, self._among)), -1).float()
        aligned = torch.cat((turned.index_select(1, self._probes), kept.index_select(1, self._probes)), -1).float()
        error = true - aligned
        _turn_back(error, *angles.probes, self._interleaved)
        shift, sums, alpha = self._shrunk_mean(error, true, turned.shape[2])
        self._seen[layer] = sums, alpha
        for number, run in enumerate(self._runs):
            if run.probes:
                residual_shift(
                    turned[None, :, run.head_end : run.end],
                    kept[None, :, run.head_end : run.end],
                    shift[None, :, number : number + 1, : turned.shape[2]],
                    shift[None, :, number : number + 1, turned.shape[2] :],
                    *angles.rows[number],
                    self._interleaved,
                )

    def residuals(self) -> list[float | None]:
        """Per run, how far its probes were off after each was corrected by the others: relative L2 error, averaged over
        layers >= 1 and over keys and values. An honest estimate of what is left in the other rows. None without probes,
        or before the forward; NaN if the KV holds NaN."""
        if not self._seen:
            return [None] * len(self._runs)
        sums = torch.stack([sums for sums, _ in self._seen.values()])
        alpha = torch.stack([alpha for _, alpha in self._seen.values()])
        square, own, size = sums.chunk(3, dim=2)
        others = (self._counts - 1).clamp_min(1)
        agreement = (square - own) / others
        strength = ((self._counts - 2) * square + own) / others.square()
        left = (own - 2 * alpha * agreement + alpha.square() * strength).clamp_min(0)
        relative = (left.sum(dim=1) / size.sum(dim=1).clamp_min(1e-12)).sqrt().mean(dim=(0, 2)).tolist()
        return [value if run.probes else None for run, value in zip(self._runs, relative, strict=True)]

    def _shrunk_mean(
        self, error: torch.Tensor, true: torch.Tensor, split: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of errors [H, probes, Dk + Dv]: alpha * mu per head and run, [H, runs, Dk + Dv], and for `residuals` the sums
        |S|^2, Q and that of the true rows' squares, [H, 3 * runs, 2], and alpha [H, runs, 2] (2: what turns, what does not).

        With S the sum and Q the sum of squares of n probes' residuals, sum_i r_i . mu_-i = (|S|^2 - Q) / (n - 1) and
        sum_i |mu_-i|^2 = ((n - 2) |S|^2 + Q) / (n - 1)^2: no probe is looked at twice.
        """
        if self._halves is None:
            # [Dk + Dv, 2], 1 where a dim is of what turns, of what does not.
            first = torch.arange(error.shape[2], device=error.device) < split
            self._halves = torch.stack((first, ~first), dim=1).float()
        total = self._of_run @ error
        sums = self._sums @ (torch.cat((total, error, true), dim=1).square() @ self._halves)
        square, own, _ = sums.chunk(3, dim=1)
        # One probe or none: the dividend is 0.
        dividend = (square - own) * (self._counts - 1)
        divisor = torch.addcmul(own, square, self._counts - 2)
        alpha = (dividend / divisor.clamp_min(1e-30)).clamp(0, 1)
        shift = total.mul_((alpha / self._counts.clamp_min(1)) @ self._halves.T)
        return shift, sums, alpha

    def _angles_of(self, layer: int) -> _Angles:
        """Those of this layer: one table for all layers that turn alike."""
        frequencies: tuple[float, ...] = ()
        if self._rotary is not None:
            frequencies = self._rotary.layers[layer] if self._rotary.layers else self._rotary.inv_freq
        found = self._angles.get(frequencies)
        if found is None:
            with torch.inference_mode(False):
                inv_freq = torch.tensor(frequencies, dtype=torch.float64)
                rows = [torch.arange(run.head_end, run.end, device=self._probes.device) for run in self._runs]
                tables = [row_angles(each, inv_freq, self._interleaved) for each in (self._probes, *rows)]
                found = _Angles(tables[0], tables[1:])
            self._angles[frequencies] = found
        return found


@dataclass(frozen=True, slots=True)
class _Angles:
    """cos and sin of the probes, and of the rows [head_end, end) of each run."""

    probes: tuple[torch.Tensor, torch.Tensor]
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def _nothing(keys: torch.Tensor, candidates: int) -> Correction:
    tokens = keys.shape[2]
    nowhere = torch.full((tokens,), torch.inf, device=keys.device)
    return Correction(torch.zeros(tokens, dtype=torch.bool, device=keys.device), nowhere, (0.0,) * candidates)


def _gather(candidates: Sequence[Deviation], part: str, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums [L-1, H, n, D] of the candidates' tokens at index [n, k], counted through all candidates."""
    used, place = index.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    ends = torch.tensor([candidate.tokens for candidate in candidates], device=index.device).cumsum(0)
    bounds = torch.searchsorted(used, ends).tolist()
    rows = []
    for number, candidate in enumerate(candidates):
        low, high = (bounds[number - 1] if number else 0), bounds[number]
        if high > low:
            stored = getattr(candidate, part).permute(2, 0, 1, 3)
            first = int(ends[number]) - candidate.tokens
            rows.append(stored.index_select(0, (used[low:high] - first).to(stored.device)).to(index.device))
    layers, heads, _, dim = getattr(candidates[0], part).shape
    pool = torch.cat(rows).flatten(1)
    summed = torch.nn.functional.embedding_bag(place, pool, mode="sum", per_sample_weights=weights.to(pool.dtype))
    return summed.view(-1, layers, heads, dim).permute(1, 2, 0, 3)


def _add(
    keys: torch.Tensor,
    values: torch.Tensor,
    shifts: Sequence[torch.Tensor],
    start: int,
    rotary: RotaryGeometry | None,
    skip: torch.Tensor | None,
) -> None:
    """Adds shifts [L-1, H, n, D] of keys and values, in the frame of position 0, to rows at start, start + 1, ... of layers
    >= 1."""
    frequencies = rotary_frequencies(rotary)
    if frequencies.ndim == 2:
        frequencies = frequencies[1:]
    positions = torch.arange(start, start + keys.shape[2], device=keys.device)
    interleaved = rotary is not None and rotary.interleaved
    cos, sin = row_angles(positions, frequencies, interleaved)
    parts = (keys[1:], values[1:])
    turned, kept = (1, 0) if rotary and rotary.in_values else (0, 1)
    residual_shift(parts[turned], parts[kept], shifts[turned], shifts[kept], cos, sin, interleaved, skip)


def _turn_back(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotates the first dims of rows [H, n, D] back to position 0, in place."""
    rows = rows[..., : cos.shape[1]]
    half = rows.shape[2] // 2
    if interleaved:
        partner = rows.reshape(*rows.shape[:2], half, 2).flip(-1).flatten(2)
    else:
        partner = torch.cat((rows[..., half:], rows[..., :half]), dim=-1)
    rows.mul_(cos).addcmul_(partner, sin, value=-1)


def _find(positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Where `rows` are among ascending `positions`."""
    among = torch.searchsorted(positions, rows)
    if bool((among >= positions.shape[0]).any()) or not torch.equal(positions[among], rows):
        raise ValueError("every probe must be among the recomputed positions")
    return among
