"""What a request asks of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from paceline.errors import PacelineError

LogitsProcessor = Callable[[Tensor, Sequence[int]], Tensor]
"""(logits of one row [V], token ids before it: prompt and output) -> logits [V]. Must be a pure function."""

Verify = Literal["auto", "rejection", "coupled", "typical"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. The chain: processors, logit_bias, penalties, temperature, top_k, top_p, min_p.

    temperature: 0 is greedy (argmax, lowest id on a tie). top_k: 0 is off; ties with the k-th stay.
    repetition_penalty counts prompt and output, presence and frequency the output only. logprobs: how many alternatives
    to report beside each token, None for none; they are the raw log-softmax, before the chain. seed: fixes the noise.
    verify: `coupled` gives the tokens of plain decoding under the same seed, `rejection` the largest acceptance;
    `auto` is coupled when there is a seed; `typical` is Medusa's acceptance and LOSSY: the answer no longer follows the
    model's distribution, and the result says so. prediction: the likely answer, text or token ids, to draft from.
    tenant: whose past answers may be drafted from. Raises PacelineError naming the first field out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 256
    ignore_eos: bool = False
    logprobs: int | None = None
    verify: Verify = "auto"
    processors: Sequence[LogitsProcessor] = ()
    prediction: str | Sequence[int] = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, value, good, want in self._ranges():
            if not good:
                raise PacelineError(f"{name} must be {want}, not {value}")

    def _ranges(self) -> list[tuple[str, object, bool, str]]:
        return [
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "over 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "over 0"),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "finite"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 100, "between 0 and 100"),
            ("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
            ("stop", list(self.stop), all(self.stop), "made of non-empty strings"),
            ("tenant", self.tenant, isinstance(self.tenant, str), "a string"),
            ("prediction", self.prediction, _is_text_or_ids(self.prediction), "a text or a list of token ids"),
            ("verify", self.verify, self.verify in get_args(Verify), "auto, rejection, coupled or typical"),
            ("logit_bias", dict(self.logit_bias), _no_nan(self.logit_bias), "finite (or -inf) for ids of 0 or more"),
        ]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def coupled(self) -> bool:
        """Greedy counts as coupled: without noise the two verifiers are the same rule."""
        return self.greedy or self.verify == "coupled" or (self.verify == "auto" and self.seed is not None)

    @property
    def lossy(self) -> bool:
        """The answer may differ from the model's own distribution."""
        return self.verify == "typical" and not self.greedy

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain_argmax(self) -> bool:
        """The chain leaves logits as they are: greedy with nothing that moves the maximum."""
        return self.greedy and not self.adjusts_logits

    @property
    def reshapes(self) -> bool:
        """The chain does more than to divide by the temperature."""
        return self.adjusts_logits or (not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0))

    @property
    def adjusts_logits(self) -> bool:
        return self.penalised or bool(self.logit_bias) or bool(self.processors)


def _is_text_or_ids(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _no_nan(bias: Mapping[int, float]) -> bool:
    return all(token >= 0 and not math.isnan(value) and value != math.inf for token, value in bias.items())
