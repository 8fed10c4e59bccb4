"""Client of an OpenAI-compatible endpoint for language models, such as vLLM, SGLang or a hosted service.

Requests run concurrently in one thread. Their number adapts to the server: it grows with each answer and shrinks when
the server is overloaded. Faults of the network and the server are retried. A question that keeps failing is given up
if the server answers others in the meantime. If the server answers none, the command ends with status 1; resume it.
"""

import asyncio
import base64
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from diffusion.config.language_model import EndpointConfig
from diffusion.errors import GaveUp, UserError
from diffusion.language_models.engine import Answer, Question
from diffusion.language_models.rejection import CUT_OFF, rejection
from diffusion.storage.retry import LONGEST_PAUSE_SECONDS, TRANSIENT_STATUS, error_text

OVERLOADED = frozenset({429, 503})
REFUSED_IMAGE = frozenset({400, 413, 415, 422})
TRIES = 8
"""Failed requests after which a question is given up; those to an overloaded or unreachable server do not count."""
FIRST_PAUSE_SECONDS = 0.25
RETRY_TEMPERATURE = 0.7
"""Minimum temperature for a second answer: at 0, the model would repeat the one that was rejected."""
FIRST_IN_FLIGHT = 8
NEW_PER_ROUND = 8
"""Number of requests to start between checks for answers: reading hundreds of images first would delay the answers."""
MAX_REFUSED_AT_START = 20
"""If the server refuses this many images before its first answer, the settings are wrong rather than the images."""


class Fault(Exception):
    """Failure of a request that may succeed on another try. `counts` is False if the image cannot be the cause."""

    def __init__(self, reason: str, *, counts: bool = True, pause_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.counts = counts
        self.pause_seconds = pause_seconds


class Refused(Exception):
    """The server rejects the image or the length of the prompt; the first argument names the rejection rule."""


class InFlightLimit:
    """Limit on concurrent requests: doubles until the first overload, then grows by one per round of answers."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.value = float(min(FIRST_IN_FLIGHT, maximum))
        self._has_shrunk = False
        self._last_shrink = -1.0

    def grow(self) -> None:
        self.value = min(self.maximum, self.value + (1 / self.value if self._has_shrunk else 1))

    def shrink(self) -> None:
        """Reduce the limit by 30%, at most once per second: one overload fails many requests at the same time."""
        now = time.monotonic()
        if now - self._last_shrink >= 1:
            self._has_shrunk, self._last_shrink = True, now
            self.value = max(1.0, self.value * 0.7)


class Endpoint:
    """Engine that asks a server. See `engine.Engine`."""

    def __init__(self, settings: EndpointConfig) -> None:
        assert settings.endpoint is not None
        self.settings = settings
        self.url = f'{settings.endpoint.rstrip("/")}/chat/completions'
        self.headers = {} if settings.token is None else {'Authorization': f'Bearer {settings.token}'}
        self.limit = InFlightLimit(settings.concurrency)
        self.last_reply: float | None = None
        self.refused_at_start = 0

    def answers(self, questions: Iterable[Question]) -> Iterator[Answer]:
        remaining, tasks, is_complete = iter(questions), set[asyncio.Task[Answer]](), False
        loop = asyncio.new_event_loop()
        session = loop.run_until_complete(self._session())
        try:
            while tasks or not is_complete:
                started = 0
                while not is_complete and started < NEW_PER_ROUND and len(tasks) < self.limit.value:
                    question = next(remaining, None)
                    is_complete = question is None
                    if question is not None:
                        tasks.add(loop.create_task(self._answer(session, question)))
                        started += 1
                if tasks:
                    has_room = not is_complete and len(tasks) < self.limit.value
                    first = asyncio.wait(tasks, timeout=0 if has_room else None, return_when=asyncio.FIRST_COMPLETED)
                    done, tasks = loop.run_until_complete(first)
                    # Yield all answers before an error ends the command, so that no answered question is asked again.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(session.close())
            loop.close()

    async def _session(self) -> Any:
        try:
            import aiohttp
        except ImportError as error:
            raise UserError("engine: endpoint needs aiohttp; pip install 'diffusion-recipes[caption]'") from error
        timeout = aiohttp.ClientTimeout(total=self.settings.timeout_seconds)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=True)

    async def _answer(self, session: Any, question: Question) -> Answer:
        """Ask until an answer passes the rejection rules, at most `attempts` times; return the last answer."""
        tokens = prompt_tokens = 0
        for attempt in range(1, self.settings.attempts + 1):
            try:
                answer = await self._reply(session, question, attempt)
            except Refused as error:
                return Answer(question, str(error.args[1]), error.args[0], tokens, prompt_tokens)
            tokens, prompt_tokens = tokens + answer.tokens, prompt_tokens + answer.prompt_tokens
            if answer.rejected in (None, CUT_OFF) or attempt == self.settings.attempts:  # another would be as long
                return replace(answer, tokens=tokens, prompt_tokens=prompt_tokens)
        raise AssertionError

    async def _reply(self, session: Any, question: Question, attempt: int) -> Answer:
        """Send a request, and repeat it after faults. Raise Refused, UserError or GaveUp if there is no answer."""
        content, begin = self._content(question, attempt), time.monotonic()
        first_fault, faults, pauses = float('inf'), 0, 0
        while True:
            try:
                reply = await self._post(session, content, question)
            except Fault as fault:
                now, faults, pauses = time.monotonic(), faults + fault.counts, pauses + 1
                first_fault = min(first_fault, now)
                waited = now - max(begin, self.last_reply or 0)
                if faults >= TRIES and self.last_reply is not None and self.last_reply > first_fault:
                    # The server answers other questions, so this image is the cause.
                    raise Refused('no_answer', str(fault)) from fault
                if waited > self.settings.patience_seconds or (faults >= TRIES and self.last_reply is None):
                    raise GaveUp(
                        f'{self.url}: no answer to {pauses} requests in {waited:.0f} s ({fault}); check the server, '
                        'then start the same command again; finished work is kept'
                    ) from fault
                longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(pauses - 1, 10))
                await asyncio.sleep(max(longest * random.uniform(0.5, 1), fault.pause_seconds))
                continue
            self.last_reply = time.monotonic()
            self.limit.grow()
            return reply

    async def _post(self, session: Any, content: bytes, question: Question) -> Answer:
        """Send one request and return the answer, or raise Fault, Refused or UserError."""
        import aiohttp

        headers = self.headers | {'Content-Type': 'application/json'}
        try:
            async with session.post(self.url, data=content, headers=headers) as response:
                body, status = await response.read(), response.status
                retry_after = response.headers.get('Retry-After')
        except asyncio.TimeoutError as error:
            self.limit.shrink()
            raise Fault(f'no answer within {self.settings.timeout_seconds:g} s') from error
        except (aiohttp.ClientError, OSError) as error:
            self.limit.shrink()
            # An image may crash the server, but is not the cause if there is no server to connect to.
            counts = not isinstance(error, aiohttp.ClientConnectorError)
            raise Fault(f'connection failed ({error_text(error)})', counts=counts) from error
        if status != 200:
            self._raise_for(status, body, retry_after)
        return self._parsed(body, question)

    def _raise_for(self, status: int, body: bytes, retry_after: str | None) -> None:
        """Raise the error for a response with another status than 200."""
        text = f'status {status}: {body[:300].decode(errors="replace")}'
        if token := self.settings.token:  # some servers repeat it
            text = text.replace(token, '<token>')
        if status in OVERLOADED:
            self.limit.shrink()
            pause = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
            raise Fault(text, counts=False, pause_seconds=min(pause, LONGEST_PAUSE_SECONDS))
        if status in REFUSED_IMAGE:
            self.refused_at_start += self.last_reply is None
            if self.refused_at_start >= MAX_REFUSED_AT_START:
                raise UserError(f'endpoint: {self.url} refuses every request ({text}); check model and max_tokens')
            is_long = any(words in text.lower() for words in ('context length', 'context_length', 'too many tokens'))
            raise Refused('context_too_long' if is_long else 'refused_by_server', text)
        if status in (401, 403):
            raise UserError(f'endpoint: {self.url} refuses access ({text}); check token_variable and its value')
        if 300 <= status < 500 and status not in TRANSIENT_STATUS:
            raise UserError(f'endpoint: {self.url} ({text}); check endpoint and model')
        raise Fault(text)

    def _parsed(self, body: bytes, question: Question) -> Answer:
        """Return the answer in a response's body; raise Fault if it has none, or if another model has answered."""
        try:
            values = json.loads(body)
            choice, usage = values['choices'][0], values.get('usage') or {}
            text, model = (choice['message']['content'] or '').strip(), values['model']
            tokens, of_prompt = (int(usage.get(f'{what}_tokens') or 0) for what in ('completion', 'prompt'))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Fault(f'not an answer ({error_text(error)})') from error
        expected = self.settings.served_as or self.settings.model
        if model != expected:
            raise Fault(f'the answer is of model {model!r}, not {expected!r}; set served_as if this is its name')
        rule = rejection(text, question.prompt, cut_off=choice.get('finish_reason') == 'length')
        return Answer(question, text, rule, tokens, of_prompt)

    def _content(self, question: Question, attempt: int) -> bytes:
        """Return the JSON of a request."""
        settings, content = self.settings, list[dict[str, Any]]([{'type': 'text', 'text': question.instruction}])
        if question.image:
            url = f'data:{question.media_type};base64,{base64.b64encode(question.image).decode()}'
            content.insert(0, {'type': 'image_url', 'image_url': {'url': url}})
        values = {'model': settings.model, 'max_tokens': settings.max_tokens, 'seed': settings.seed + attempt - 1}
        values |= {'temperature': max(settings.temperature, RETRY_TEMPERATURE if attempt > 1 else 0)}
        return json.dumps(values | {'messages': [{'role': 'user', 'content': content}]}).encode()
