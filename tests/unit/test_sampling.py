"""The transform and the noise."""

from __future__ import annotations

import math

import pytest
import torch
from native_lab import needs_kernels
from scipy.stats import kstest

from paceline.errors import PacelineError
from paceline.sampling.noise import Purpose, gumbel, key, sample, uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.transform import NEVER, Cut, RowSpan, tempered, transform, truncate
from paceline.types import NO_DRAFT


def span(params: SamplingParams, tokens: list[int], prompt: int, draft: list[int] | None = None) -> RowSpan:
    drafted = NO_DRAFT.tokens if draft is None else torch.tensor(draft)
    return RowSpan(params, tokens, prompt, 0, drafted, [range(i) for i in range(len(drafted) + 1)])


def test_top_k_keeps_the_k_likeliest() -> None:
    scores = truncate(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), Cut(1.0, 2, 1.0, 0.0))
    assert (scores > NEVER).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert int((truncate(logits, Cut(1.0, 0, top_p, 0.0)) > NEVER).sum()) == kept


def test_top_p_over_a_wide_vocabulary_equals_a_full_sort() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    kept = truncate(logits, Cut(1.0, 0, 0.97, 0.0)) > NEVER
    ranked, order = logits.softmax(dim=1).sort(dim=1, descending=True)
    inside = ranked.cumsum(dim=1) - ranked < 0.97
    assert (kept.gather(1, order) == inside).float().mean() > 0.999
    assert 256 < int(kept[0].sum()) < 5000  # past the first look


def test_min_p_drops_what_is_far_below_the_maximum() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    assert (truncate(logits, Cut(1.0, 0, 1.0, 0.4)) > NEVER).tolist() == [[True, True, False]]


def test_temperature_scales_and_a_tiny_one_is_the_argmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    halved = truncate(logits, Cut(0.5, 0, 1.0, 0.0)).softmax(dim=1)
    torch.testing.assert_close(halved, (logits * 2).softmax(dim=1))
    assert truncate(logits * 1e3, Cut(1e-30, 0, 1.0, 0.0)).softmax(dim=1).tolist() == [[1.0, 0.0, 0.0]]


@needs_kernels
@pytest.mark.parametrize("width", [1, 7, 1003])
@pytest.mark.parametrize("temperature", [1e-30, 0.3, 0.8, 7.0])
def test_the_kernels_divide_by_the_temperature_as_pytorch_does(
    width: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = 5 * torch.randn(3, width)
    x[0, ::2] = NEVER
    found = tempered(x, temperature)
    monkeypatch.setattr("paceline.sampling.best._has_kernels", lambda: False)
    torch.testing.assert_close(found, tempered(x, temperature), atol=0, rtol=0, equal_nan=True)


def test_penalties_follow_each_rows_own_history() -> None:
    """Row i counts the first i drafts; repetition counts the prompt too, the others do not."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([[1.0, -1.0, 1.0, 1.0]]).repeat(3, 1)
    rows = transform(logits, [span(params, [0, 1, 2], 2, [2, 3])])
    base = torch.tensor([0.5, -2.0, 0.5, 1.0])
    torch.testing.assert_close(rows[0], base - torch.tensor([0.0, 0.0, 0.75, 0.0]))
    torch.testing.assert_close(rows[1], base - torch.tensor([0.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(rows[2], torch.tensor([0.5, -2.0, 0.5, 0.5]) - torch.tensor([0.0, 0.0, 1.0, 0.75]))


def test_bias_moves_and_bans() -> None:
    params = SamplingParams(logit_bias={0: 5.0, 2: NEVER, 99: 1.0})
    assert transform(torch.tensor([[0.0, 1.0, 9.0]]), [span(params, [1], 1)]).tolist() == [[5.0, 1.0, NEVER]]


def test_plain_greedy_leaves_the_logits_alone() -> None:
    logits = torch.randn(2, 5)
    assert transform(logits, [span(SamplingParams(), [1], 1, [2])]) is logits


@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_transformed_as_if_each_request_were_alone(biased: bool) -> None:
    """Also where all are cut alike; a row that no request asks about is left as it is."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    warm = SamplingParams(temperature=0.5, top_k=3)
    other = SamplingParams(temperature=0.5, top_k=3, logit_bias={4: 9.0}) if biased else warm
    spans = [RowSpan(warm, [1], 1, 0), RowSpan(other, [1], 1, 1)]
    rows = transform(logits, spans)
    for row, params in enumerate((warm, other)):
        alone = transform(logits[row : row + 1].clone(), [RowSpan(params, [1], 1, 0)])
        assert torch.equal(rows[row], alone[0])
    assert torch.equal(rows[2], logits[2])
    assert (rows[1].argmax() == 4) == biased


def test_transform_does_not_change_its_input() -> None:
    logits = torch.randn(1, 5)
    before = logits.clone()
    transform(logits, [span(SamplingParams(temperature=0.7, top_k=2, logit_bias={1: 3.0}), [1], 1)])
    assert torch.equal(logits, before)


def test_noise_is_uniform_and_differs_by_every_part_of_its_key() -> None:
    index = torch.arange(20_000)
    draws = uniform(torch.tensor(key(1, 2, Purpose.SAMPLE)), index)
    assert kstest(draws.numpy(), "uniform").pvalue > 1e-3
    along_positions = torch.stack(
        [uniform(torch.tensor(key(1, t, Purpose.SAMPLE)), torch.tensor(7)) for t in range(2000)]
    )
    assert kstest(along_positions.numpy(), "uniform").pvalue > 1e-3
    for other in (key(2, 2, Purpose.SAMPLE), key(1, 3, Purpose.SAMPLE), key(1, 2, Purpose.DRAFT)):
        again = uniform(torch.tensor(other), index)
        assert abs(float(torch.corrcoef(torch.stack((draws, again)))[0, 1])) < 0.03


def test_no_draw_leaves_its_bounds() -> None:
    worst = torch.tensor([0.5, 2**32 - 0.5], dtype=torch.float64) * 2.0**-32
    low, high = (float(-(-u.log()).log()) for u in worst)
    assert -3.2 < low < high < 22.9  # MOST_NOISE in native/src/rows.h


@pytest.mark.parametrize("width", [1, 5, 255, 257, 4000, 49_152])
def test_draws_are_what_noise_on_every_token_gives(width: int) -> None:
    """Where only the tokens that can still win get noise, the winner is among them."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(60, width, generator=generator) * torch.linspace(0.01, 20, 60)[:, None]
    scores[20:40] = scores[20:40].masked_fill(scores[20:40] < scores[20:40].median(), -math.inf)
    keys = torch.tensor([key(9, t, Purpose.SAMPLE) for t in range(60)])
    names = torch.randperm(100_000, generator=generator)[:width]
    for ids in (None, names):
        noise = gumbel(keys[:, None, :], torch.arange(width) if ids is None else ids)
        assert sample(scores, keys, ids).tolist() == (scores.double() + noise).argmax(dim=1).tolist()


def test_sampling_follows_softmax() -> None:
    scores = torch.tensor([0.1, 0.2, 0.7]).log().expand(6000, 3)
    keys = torch.tensor([key(s, 0, Purpose.SAMPLE) for s in range(6000)])
    share = torch.bincount(sample(scores, keys), minlength=3) / 6000
    assert all(abs(float(s) - w) < 4 * math.sqrt(w / 6000) for s, w in zip(share, (0.1, 0.2, 0.7), strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", 2.0),
        ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("max_tokens", 0), ("logprobs", -1), ("seed", -3),
        ("stop", ("",)), ("verify", "hope"), ("logit_bias", {3: math.nan}),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_what_would_be_right(field: str, value: object) -> None:
    with pytest.raises(PacelineError, match=rf"^{field} must be .*, not "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_coupled_is_the_default_with_a_seed() -> None:
    assert SamplingParams(temperature=1, seed=1).coupled
    assert not SamplingParams(temperature=1).coupled
    assert not SamplingParams(temperature=1, seed=1, verify="rejection").coupled
    assert SamplingParams(verify="rejection").coupled  # greedy: the two rules are one
