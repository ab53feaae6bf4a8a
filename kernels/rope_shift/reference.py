"""Plain torch: the definition that the Triton twin is tested against, and what runs on CPUs, so it is written to be
fast.

Work goes in groups of layers that fit a core's cache, because each group is read three times; one shift for all tokens
(the usual call) needs no per-token angles, and consecutive source tokens need no gather.
"""

from __future__ import annotations

import torch

_GROUP_BYTES = 1 << 20


def rope_shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    position_map: torch.Tensor | None,
    shift: torch.Tensor | int,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    """See the contract in `kvcomm_p2p.kernels.rope_shift`; arguments are already checked."""
    if position_map is None:
        tokens = out_keys.shape[2]
        out_values.copy_(values[:, :, :tokens])
        _rotate_into(keys[:, :, :tokens], shift, inv_freq, interleaved, out_keys)
        return
    targets = torch.nonzero(position_map >= 0).squeeze(1)
    sources = position_map[targets]
    if sources.numel() == 0:
        return
    if isinstance(shift, torch.Tensor):
        shift = shift[targets]
    everything = targets.shape[0] == out_keys.shape[2]
    stretch = int(sources[-1]) - int(sources[0]) == sources.shape[0] - 1 and bool(
        (sources[1:] - sources[:-1] == 1).all()
    )
    if stretch and everything:
        window = slice(int(sources[0]), int(sources[-1]) + 1)
        out_values.copy_(values[:, :, window])
        _rotate_into(keys[:, :, window], shift, inv_freq, interleaved, out_keys)
        return
    gathered = keys.index_select(2, sources)
    _rotate_into(gathered, shift, inv_freq, interleaved, gathered)
    if everything:
        out_keys.copy_(gathered)
        out_values.copy_(values.index_select(2, sources))
    else:
        out_keys.index_copy_(2, targets, gathered)
        out_values.index_copy_(2, targets, values.index_select(2, sources))


def _rotate_into(
    keys: torch.Tensor, shift: torch.Tensor | int, inv_freq: torch.Tensor, interleaved: bool, out: torch.Tensor
) -> None:
    """keys [L, H, T, Dk] rotated by shift (int or [T]) into `out`, which may be `keys` itself."""
    rotated = 2 * inv_freq.shape[-1]
    moves = bool((shift != 0).any()) if isinstance(shift, torch.Tensor) else shift != 0
    if not moves or rotated == 0:
        if out is not keys:
            out.copy_(keys)
        return
    if rotated < keys.shape[3] and out is not keys:
        out[..., rotated:].copy_(keys[..., rotated:])
    cos, sin = _angles(shift, inv_freq.to(keys.device), interleaved)
    layer_bytes = max(1, keys[0].numel() * 4)
    group = max(1, _GROUP_BYTES // layer_bytes)
    for first in range(0, keys.shape[0], group):
        source, target = keys[first : first + group, ..., :rotated], out[first : first + group, ..., :rotated]
        wide = source if source.dtype == torch.float32 else source.float()
        partner = _swap_pairs(wide, interleaved)
        c, s = (cos, sin) if inv_freq.ndim == 1 else (cos[first : first + group], sin[first : first + group])
        if target.dtype == torch.float32:
            torch.mul(wide, c, out=target)
            target.addcmul_(partner, s)
        else:
            target.copy_(wide.mul_(c).addcmul_(partner, s))


def _angles(shift: torch.Tensor | int, inv_freq: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, float32: rotated = x * cos + partner(x) * sin. Shift 0 gives exactly 1 and 0.

    [R] or [T, R] for inv_freq [R/2]; [L, 1, 1, R] or [L, 1, T, R] for inv_freq [L, R/2].
    """
    distance = shift.to(torch.float64)[:, None] if isinstance(shift, torch.Tensor) else float(shift)
    angle = distance * (inv_freq if inv_freq.ndim == 1 else inv_freq[:, None, None])
    cos, sin = angle.cos().float(), angle.sin().float()
    if interleaved:
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _swap_pairs(keys: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A copy in which every dim holds its partner's value."""
    half = keys.shape[-1] // 2
    if interleaved:
        return keys.reshape(*keys.shape[:-1], half, 2).flip(-1).flatten(-2)
    return torch.cat((keys[..., half:], keys[..., :half]), -1)
