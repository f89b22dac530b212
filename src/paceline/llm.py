"""The facade that scripts use."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, overload

from paceline.build import Models, Options, build_engine, load_models
from paceline.errors import PacelineError
from paceline.result import GenerationResult, StreamChunk
from paceline.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM:
    """A target model, a drafting method, and the loop.

        llm = LLM("smollm2-135m")
        print(llm.chat([{"role": "user", "content": "Hello"}]).text)

    Arguments after `model` are those of `Options`. Raises PacelineError for anything the user can mend.
    """

    def __init__(self, model: str, *, models: Models | None = None, **options: Any) -> None:
        self.options = Options(model, **options)
        self.models = models or load_models(self.options)
        self.engine = build_engine(self.options, self.models)

    @property
    def tokenizer(self) -> Any:
        return self.models.target.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, params: SamplingParams | None = None
    ) -> GenerationResult: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]: ...
    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> GenerationResult | list[GenerationResult]:
        """Continue each prompt (text or token ids). One text gives one result, a list gives a list in its order."""
        if isinstance(prompts, str):
            return self._run([prompts], [single(params)])[0]
        if any(isinstance(prompt, int) for prompt in prompts):
            raise PacelineError("prompts must be texts or lists of token ids; put one list of ids in another list")
        several = params if isinstance(params, Sequence) else [single(params)] * len(prompts)
        if len(several) != len(prompts):
            raise PacelineError(f"{len(prompts)} prompts but {len(several)} sampling parameters; give one or as many")
        return self._run(prompts, several)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> GenerationResult:
        """Answer a conversation, rendered with the model's own chat template."""
        return self._run([self.chat_prompt(messages)], [single(params)])[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamChunk, None, None]:
        """Chunks as they become final. Closing the iterator early ends the request."""
        sequence = self.engine.add(self.encode(prompt), single(params))
        sent = sequence.prompt_length
        try:
            while sequence.finish_reason is None:
                self.engine.step()
                if sequence.finish_reason is None and len(sequence.tokens) > sent:
                    yield StreamChunk(sequence.output.read(), sequence.tokens[sent:])
                    sent = len(sequence.tokens)
            yield StreamChunk(sequence.output.read(), sequence.tokens[sent:], GenerationResult.of(sequence))
        finally:
            self.engine.abort(sequence)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        text = self.tokenizer.render_chat([dict(message) for message in messages])
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        if not prompt:
            raise PacelineError("the prompt is empty: give some text")
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        return list(prompt)

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[GenerationResult]:
        encoded = [self.encode(prompt) for prompt in prompts]
        sequences = []
        try:
            for ids, each in zip(encoded, params, strict=True):
                sequences.append(self.engine.add(ids, each))
            while any(s.finish_reason is None for s in sequences):
                self.engine.step()
        finally:
            for sequence in sequences:
                self.engine.abort(sequence)
        return [GenerationResult.of(sequence) for sequence in sequences]


def single(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise PacelineError(f"params must be SamplingParams, not {type(params).__name__}")
    return params
