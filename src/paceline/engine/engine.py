"""Many requests, one loop: requests join and leave between steps."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import psutil
import torch

from paceline.cache.pool import BlockPool, CacheUsage
from paceline.device import Backend
from paceline.engine.controller import Controller
from paceline.engine.output import Output
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Stepper
from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.propose.base import Proposer
from paceline.sampling.params import SamplingParams
from paceline.types import Sequence
from paceline.weights.load import LoadedModel


@dataclass(frozen=True)
class EngineConfig:
    """max_batch: requests that run together. prefill_chunk: prompt tokens of one request in a step. cache_bytes: the
    key/value pool (None: a fifth of the free memory, at most 2 GiB on a CPU; most of what is free on a GPU)."""

    max_batch: int = 16
    prefill_chunk: int = 256
    max_prefill_rows: int = 512
    block_size: int = 16
    cache_bytes: int | None = None


class Engine:
    """Owns the target's cache, the proposer and the queue. Not thread-safe: one thread calls it."""

    def __init__(
        self, model: LoadedModel, proposer: Proposer, pool: BlockPool, controller: Controller, config: EngineConfig
    ) -> None:
        self.model, self.pool, self.config = model, pool, config
        self.proposer, self.controller = proposer, controller
        self.scheduler = Scheduler(
            pool, proposer, config.max_batch, config.prefill_chunk, max(config.max_prefill_rows, config.prefill_chunk)
        )
        self.stepper = Stepper(
            model.decoder, pool, proposer, controller, model.vocab_size, reuse_decoded=model.backend.row_invariant
        )
        self._ids = itertools.count()

    def add(self, prompt: Seq[int], params: SamplingParams) -> Sequence:
        """Queue a request. Raises PacelineError for a prompt that is empty, past the context or the cache."""
        limit = self.model.config.max_positions
        if not prompt:
            raise PacelineError("the prompt is empty: give at least one token")
        if len(prompt) >= limit:
            raise PacelineError(
                f"the prompt has {len(prompt)} tokens, the context of {self.model.name} is {limit}; shorten it"
            )
        bad = next((t for t in prompt if not 0 <= t < self.model.config.vocab_size), None)
        if bad is not None:
            raise PacelineError(f"token id {bad} is not in the vocabulary of {self.model.config.vocab_size} ids")
        room = min(limit, len(prompt) + params.max_tokens)
        if self.pool.blocks_for(room) > self.pool.blocks:
            held = self.pool.blocks * self.pool.block_size
            raise PacelineError(
                f"prompt and max_tokens come to {room} tokens, the cache holds {held}; "
                "lower max_tokens or raise cache_bytes"
            )
        output = Output.of(self.model.tokenizer, params, self.model.eos_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = Sequence(
            next(self._ids), list(prompt), len(prompt), params, seed, room, output,
            prediction=self._prediction(params), tenant=params.tenant,
        )  # fmt: skip
        sequence.stats.prompt_tokens = len(prompt)
        self.scheduler.waiting.append(sequence)
        return sequence

    def _prediction(self, params: SamplingParams) -> list[int]:
        """Token ids of the request's own likely answer; ids that are no tokens are never proposed."""
        if isinstance(params.prediction, str):
            return self.model.tokenizer.encode(params.prediction, bos=False) if params.prediction else []
        return [token for token in params.prediction if 0 <= token < self.model.vocab_size]

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One step for whoever is scheduled; returns the sequences that finished with it."""
        for sequence in [s for s in self.scheduler.running if s.finish_reason is not None]:
            self._finish(sequence)  # it ended in a step that failed later on
        work = self.scheduler.schedule()
        if not work:
            return []
        finished = self.stepper.step(work)
        for sequence in finished:
            self._finish(sequence)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """End a request now, keeping what it has."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "aborted"
            sequence.output.end()
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.controller.forget(sequence.id)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def cache_usage(self) -> CacheUsage:
        return self.pool.usage()


def make_pool(config: ModelConfig, backend: Backend, salt: str, engine: EngineConfig) -> BlockPool:
    """A pool within the byte budget, never larger than `max_batch` full contexts."""
    size = BlockPool.bytes_per_block(config, backend.cache_dtype, engine.block_size)
    budget = engine.cache_bytes if engine.cache_bytes is not None else _default_bytes(backend.device)
    most = engine.max_batch * -(-config.max_positions // engine.block_size)
    blocks = min(budget // size, most)
    if blocks < 1:
        raise PacelineError(f"cache_bytes of {budget} holds no block of {size} bytes; raise it")
    return BlockPool(config, blocks, backend.device, backend.cache_dtype, engine.block_size, salt)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.6)
    return min(2 << 30, int(psutil.virtual_memory().available * 0.2))
