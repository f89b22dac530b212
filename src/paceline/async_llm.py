"""The engine behind asyncio: one thread steps it, coroutines add requests and await their chunks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline.errors import PacelineError
from paceline.llm import LLM, Message, Prompt, single
from paceline.result import GenerationResult, StreamChunk
from paceline.sampling.params import SamplingParams
from paceline.types import Sequence as Request


@dataclass
class _Live:
    """A request in the engine and where its chunks go. `sent`: tokens delivered so far."""

    request: Request
    deliver: Callable[[StreamChunk | Exception], None]
    sent: int


class AsyncLLM:
    """Same arguments as `LLM`. Use `async with`, or call `close()`; requests of all coroutines share each step."""

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[int, _Live] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> GenerationResult:
        async for chunk in self.stream(prompt, params):
            if chunk.result is not None:
                return chunk.result
        raise RuntimeError("the engine stopped before the request ended")

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> GenerationResult:
        return await self.generate(self._llm.chat_prompt(messages), params)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Chunks as they become final; cancelling the coroutine ends the request."""
        if self._closed:
            raise PacelineError("the engine is closed; make a new AsyncLLM")
        ids, checked = self._llm.encode(prompt), single(params)
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[StreamChunk | Exception] = asyncio.Queue()
        ticket = object()

        def deliver(chunk: StreamChunk | Exception) -> None:
            with suppress(RuntimeError):  # the loop was closed: no one waits any more
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        self._inbox.put(lambda: self._add(id(ticket), ids, checked, deliver))
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.result is not None:
                    return
        finally:
            self._inbox.put(lambda: self._abort(id(ticket)))

    def close(self) -> None:
        """Stop after the current step; requests under way end with an error."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()
        self._refuse_latecomers()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _run(self) -> None:
        while True:
            try:
                if not self._take_messages():
                    break
                self._llm.engine.step()
                for ticket, live in list(self._live.items()):
                    self._send_news(ticket, live)
            except Exception as error:  # whatever broke must not leave its waiters hanging
                self._fail(error)
        self._refuse_latecomers()

    def _refuse_latecomers(self) -> None:
        """Requests that were put in the inbox while the engine closed end with an error, like those under way."""
        with suppress(queue.Empty):
            while True:
                message = self._inbox.get(block=False)
                if message is not None:
                    message()
        self._fail(PacelineError("the engine was closed before the request ended"))

    def _take_messages(self) -> bool:
        """Handle what coroutines asked for; wait for it when there is nothing to compute. False: close."""
        while True:
            try:
                message = self._inbox.get(block=self._llm.engine.idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _add(
        self, ticket: int, ids: list[int], params: SamplingParams, deliver: Callable[[StreamChunk | Exception], None]
    ) -> None:
        try:
            request = self._llm.engine.add(ids, params)
        except Exception as error:
            deliver(error)
            return
        self._live[ticket] = _Live(request, deliver, request.prompt_length)

    def _abort(self, ticket: int) -> None:
        live = self._live.pop(ticket, None)
        if live is not None:
            self._llm.engine.abort(live.request)

    def _send_news(self, ticket: int, live: _Live) -> None:
        request = live.request
        result = GenerationResult.of(request) if request.finish_reason is not None else None
        if result is None and len(request.tokens) == live.sent:
            return
        live.deliver(StreamChunk(request.output.read(), request.tokens[live.sent :], result))
        live.sent = len(request.tokens)
        if result is not None:
            del self._live[ticket]

    def _fail(self, error: Exception) -> None:
        for live in self._live.values():
            live.deliver(error)
            with suppress(Exception):  # whoever waits must hear of the first error, whatever cleaning up meets
                self._llm.engine.abort(live.request)
        self._live.clear()
