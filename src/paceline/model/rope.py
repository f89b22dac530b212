"""Rotary position embedding: inverse frequencies for each scaling rule, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.model.config import ModelConfig, RopeConfig


class Rope:
    """Cosines and signed sines for one `RopeConfig`, grown on demand.

    The rotation is x * cos + roll(x, d/2) * sin with sin = [-s, s]: the half-split form of RoFormer that
    Hugging Face checkpoints use.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self.amplitude = inverse_frequencies(config, head_dim)
        self.frequencies = frequencies.to(device)
        self.cos = torch.empty(0, head_dim, device=device)
        self.sin = torch.empty(0, head_dim, device=device)
        self.half_cos = self.half_sin = torch.empty(0, head_dim // 2, device=device)

    def table(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin for `positions` [T], each [T, 1, head_dim]; `longest` bounds the positions."""
        if longest > self.cos.shape[0]:
            self._grow(max(longest, 2 * self.cos.shape[0], 1024))
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def halves(self, longest: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions below `longest` and perhaps more, each [.., head_dim / 2]."""
        if longest > self.cos.shape[0]:
            self._grow(max(longest, 2 * self.cos.shape[0], 1024))
        return self.half_cos, self.half_sin

    def _grow(self, length: int) -> None:
        angles = torch.arange(length, device=self.frequencies.device).double()[:, None] * self.frequencies.double()
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        self.cos = torch.cat((cos, cos), dim=-1).float()
        self.sin = torch.cat((-sin, sin), dim=-1).float()
        self.half_cos, self.half_sin = cos.float(), sin.float()


def ropes(config: ModelConfig, device: torch.device) -> dict[bool, Rope]:
    """The layers' rotations, keyed by "is a sliding layer"; empty for a model without rotary positions."""
    if config.rope is None:
        return {}
    everywhere = Rope(config.rope, config.head_dim, device)
    local = config.local_rope
    return {False: everywhere, True: Rope(local, config.head_dim, device) if local else everywhere}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by tables [T, 1, head_dim]; computed in the tables' dtype (fp32)."""
    half = x.shape[-1] // 2
    rotated = torch.addcmul(x * cos, x.roll(half, -1), sin)
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position for each pair, [head_dim / 2], and the factor on cos and sin (1 except for yarn)."""
    exponents = torch.arange(0, head_dim, 2).double() / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.frequency_divisors:
        frequencies = frequencies / torch.tensor(config.frequency_divisors).double()
    if config.scaling == "linear":
        return (frequencies / config.factor).float(), 1.0
    if config.scaling == "llama3":
        return _llama3(frequencies, config).float(), 1.0
    if config.scaling == "yarn":
        amplitude = config.attention_factor
        if amplitude is None:
            amplitude = 1.0 if config.factor <= 1 else 0.1 * math.log(config.factor) + 1.0
        return _yarn(frequencies, config, head_dim).float(), amplitude
    return frequencies.float(), 1.0


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: low frequencies divided by the factor, high ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(frequencies: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow dimensions, keep fast ones, ramp between."""

    def dimension_of(turns: float) -> float:
        span = config.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).double() - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp)
