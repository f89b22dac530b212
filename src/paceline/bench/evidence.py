"""The guarantee checked on a user's own model and draft: each check says what it did and what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.build import Models, Options, load_models
from paceline.cache.pool import BlockPool
from paceline.cache.tree import chain
from paceline.llm import LLM
from paceline.methods import available_methods
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.sampling.noise import Purpose, key, sample, uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.transform import Cut, truncate
from paceline.text.tokenizer import Tokenizer
from paceline.verify.rejection import verify_rejection
from paceline.verify.trees import line_up
from paceline.weights.load import LoadedModel

DRAWS = 20_000


@dataclass(frozen=True)
class Check:
    """`passed` is None where the backend does not promise what was looked at."""

    name: str
    passed: bool | None
    seen: str


def run_checks(options: Options, prompts: list[str], tokens: int, seeds: int) -> Iterator[Check]:
    """Checks as they finish."""
    models = load_models(replace(options, method="auto"))
    layers = models.target.config.num_layers
    methods = [method for method in available_methods(options.draft, options.known_head, layers) if method != "none"]
    engines = {m: LLM(**_options(options, m), models=models) for m in ("none", *methods)}
    ids = [encode(models.target.tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    for method in methods:
        yield _same_tokens(engines, method, ids, [SamplingParams(max_tokens=tokens)], "greedy")
    sampled = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=tokens) for seed in range(seeds)]
    for method in methods:
        yield _same_tokens(engines, method, ids[:1], sampled, f"coupled, temperature 0.8, {seeds} seeds")
    with torch.inference_mode():
        logits = _all_logits(models.target, ids[0], len(ids[0]))
        yield _rows(models.target, ids[0], logits)
        yield _prefix(models.target, ids[0], logits)
        yield from _rejection(models, ids[0], logits.cpu())


def _options(options: Options, method: str) -> dict[str, Any]:
    return {**vars(options), "method": method}


def encode(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Rendered as a chat; for a base model, which has no template, the bare text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    return tokenizer.encode(tokenizer.render_chat(messages))


def _same_tokens(
    engines: dict[str, LLM], method: str, prompts: list[list[int]], params: list[SamplingParams], what: str
) -> Check:
    """Every answer of `method` against plain decoding's, id for id; a difference is shown with its logit margin."""
    compared, drafted, accepted = 0, 0, 0
    for ids in prompts:
        for each in params:
            plain = engines["none"].generate([ids], each)[0]
            fast = engines[method].generate([ids], each)[0]
            drafted, accepted = drafted + fast.stats.drafted, accepted + fast.stats.accepted
            compared += len(plain.token_ids)
            if plain.token_ids != fast.token_ids:
                at = next(i for i, (a, b) in enumerate(zip(plain.token_ids, fast.token_ids, strict=False)) if a != b)
                again = engines["none"].generate([ids], replace(each, logprobs=2))[0]
                assert again.logprobs is not None
                best = sorted(again.logprobs[at].top.values(), reverse=True)
                seen = f"differs at token {at}, where the two best are {best[0] - best[1]:.5f} apart in log probability"
                promised = False if engines["none"].models.target.backend.row_invariant else None
                return Check(f"{method}: {what}", promised, seen)
    seen = f"{compared} tokens equal in {len(prompts) * len(params)} answers, {accepted} of {drafted} drafts accepted"
    return Check(f"{method}: {what}", True, seen)


def _all_logits(model: LoadedModel, ids: list[int], step: int) -> Tensor:
    """Logits [n, V] of every position, computed `step` rows at a time."""
    backend = model.backend
    pool = BlockPool(model.config, len(ids) // 16 + 1, backend.device, backend.cache_dtype)
    cache = pool.open([], len(ids))
    rows = []
    for begin in range(0, len(ids), step):
        part = torch.tensor(ids[begin : begin + step], device=backend.device)
        count = part.shape[0]
        cache.append(count)
        hidden, _ = model.decoder.forward(Batch(part, [Span(cache, 0, count, begin)], pool))
        cache.commit(range(count), ids)
        rows.append(model.decoder.logits(hidden))
    return torch.cat(rows)[:, : model.vocab_size]


def _rows(model: LoadedModel, ids: list[int], together: Tensor) -> Check:
    name = "one row at a time against all rows at once"
    apart = _all_logits(model, ids[:64], 1)
    gap = float((apart - together[:64]).abs().max())
    if torch.equal(apart, together[:64]):
        return Check(name, True, f"{len(apart)} rows equal in every bit")
    promised = False if model.backend.row_invariant else None
    return Check(
        name, promised, f"largest logit difference {gap:.2e} ({model.backend.precision} on {model.backend.device})"
    )


def _prefix(model: LoadedModel, ids: list[int], fresh: Tensor) -> Check:
    """A cache filled in uneven commits, then rolled back and refilled, against one fresh prefill."""
    name = "cache after commits and rollbacks against a fresh prefill"
    pieces = _uneven(model, ids)
    gap = float((pieces - fresh[-1]).abs().max())
    if model.backend.row_invariant:
        return Check(name, gap == 0, f"largest logit difference {gap:.2e}")
    return Check(name, None if gap < 1 else False, f"largest logit difference {gap:.2e}")


def _uneven(model: LoadedModel, ids: list[int]) -> Tensor:
    backend = model.backend
    pool = BlockPool(model.config, len(ids) // 16 + 2, backend.device, backend.cache_dtype)
    cache = pool.open([], len(ids) + 5)
    logits = torch.empty(0)
    while cache.length < len(ids):
        begin = cache.length
        part = ids[begin : begin + 1 + begin % 5]
        fed = torch.tensor(part + [0] * 3, device=backend.device)[: len(ids) + 5 - begin]  # rejected drafts behind
        cache.append(len(fed))
        hidden, _ = model.decoder.forward(Batch(fed, [Span(cache, 0, len(fed), begin)], pool))
        logits = model.decoder.logits(hidden[len(part) - 1 : len(part)])[0, : model.vocab_size]
        cache.commit(range(len(part)), ids)
    return logits


def _rejection(models: Models, ids: list[int], logits: Tensor) -> Iterator[Check]:
    """Rejection verification on the models' own numbers: the first emitted token must follow the target."""
    params = SamplingParams(temperature=1.0, top_k=12)
    scores = truncate(logits[-1:], Cut.of(params))
    likeliest = int(scores.argmax())
    yield _chi_square("rejection, a fixed draft token", scores, None, lambda keys: torch.full((DRAWS,), likeliest))
    if models.draft is not None and models.draft.decoder.head_ids is None:
        width = scores.shape[1]
        guess = truncate(_all_logits(models.draft, ids, len(ids))[-1:, :width].cpu(), Cut.of(params))
        q = guess.softmax(dim=1)
        yield _chi_square(
            "rejection, drafts sampled from the draft model",
            scores,
            q,
            lambda keys: sample(guess.expand(DRAWS, -1), keys),
        )


def _chi_square(name: str, scores: Tensor, q: Tensor | None, draw: Callable[[Tensor], Tensor]) -> Check:
    """DRAWS independent verifications of one drafted token against softmax(scores), as a chi-square test."""
    support = (scores[0] > float("-inf")).nonzero().squeeze(1)
    if q is not None:
        support = torch.unique(torch.cat((support, q[0].nonzero().squeeze(1))))
    small = scores[:, support].expand(DRAWS * 2, -1)
    words = {
        p: torch.tensor([key(i, 0, p) for i in range(DRAWS)]) for p in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)
    }
    drafts = torch.searchsorted(support, draw(words[Purpose.DRAFT]))
    trees = line_up(range(0, 2 * DRAWS, 2), list(drafts[:, None]), [chain(1)] * DRAWS, scores.device)
    q_small = None if q is None else q[:, support].expand(DRAWS, -1)[:, None]
    uniforms = uniform(words[Purpose.ACCEPT], torch.zeros((), dtype=torch.int64))[:, None]
    accepted, token = verify_rejection(
        small, trees, q_small, uniforms, words[Purpose.RESIDUAL].repeat_interleave(2, dim=0)
    )
    first = torch.where(accepted > 0, drafts, token)
    expected = small[0].softmax(dim=0).double() * DRAWS
    keep = expected >= 5
    observed = torch.bincount(first, minlength=len(support)).double()
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    degrees = max(int(keep.sum()) - 1, 1)
    # Wilson-Hilferty: (X / n)^(1/3) is close to normal; 4 standard deviations is one false alarm in 30,000.
    deviation = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    alien = int(observed[expected == 0].sum())
    share = float((accepted > 0).double().mean())
    seen = f"chi-square {statistic:.1f} at {degrees} degrees of freedom, {DRAWS} draws, {share:.0%} accepted"
    return Check(name, deviation < 4 and alien == 0, seen)
