"""Servers of the target answer: any number of them, each with several requests at a time.

What they need to be told and how they reply is in `dialects`. A server that stops answering is
dropped, its requests go to the others, and it is asked again with the next batch.
"""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configs.collection import ServerSection
from ..configs.errors import UserError, did_you_mean
from .dialects import DIALECTS, OTHER, Dialect, Query, Told
from .gather import After, GatherSettings, Keep, Request, refuse_rules
from .records import Record
from .told import Reader
from .warp import Law

LOG = logging.getLogger(__name__)

PROBE = "Total: 1,234.50 EUR\n\n\tdef naïve(x):  # 日本\n        return {'a': [x ** 2]}"
"""Text whose tokens two tokenizers would hardly share by chance."""
PROBE_TOP = 5
CONNECT = 10.0
"""Seconds until a connection stands; a server that did not answer before has them in all."""
PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 that may be others later."""


class _Down(Exception):
    """A server cannot be had for the time being, tried as often as is allowed."""


@dataclass(frozen=True)
class Server:
    """One server, as it described itself.

    of_law: its log-probabilities are of the sampled temperature, not of temperature 1.
    """

    address: str
    dialect: Dialect
    model: str
    of_law: bool = False


@dataclass(frozen=True)
class _Job:
    """A request of the conversation that began with request number `first`."""

    first: int
    request: Request


@dataclass
class _Batch:
    """What one call of `answer` is about."""

    queue: "asyncio.Queue[_Job]"
    settings: GatherSettings
    progress: Callable[[int], None]
    after: After
    done: dict[tuple[int, int], Record]
    rows: int
    """Requests in flight at each address, at most."""


class ServerBackend:
    """A `Backend` over `section.addresses` (what `served.serving` yields, where it has a command).

    Replies to token ids come back as token ids. Where a server tells text only, it is tokenised
    again, which need not give the tokens that were drawn: such records are not `exact`. Where one
    stops at an end token of its own that is none of `eos_ids`, the reply is kept as one cut by
    length. Both are logged, once.

    The key in the environment's OPENAI_API_KEY, if any, is sent to every address.

    Args:
        eos_ids: end tokens of the target, which a finished reply has as its last token.
        vocab_size: ids that exist; a reply with others is refused.
        longest: tokens of the longest conversation that may be asked.
        seen: called with every request and all that the server answers it.
    Raises:
        UserError: the package openai is missing.
    """

    def __init__(
        self,
        section: ServerSection,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        vocab_size: int,
        longest: int,
        seen: Callable[[Request, dict[str, Any]], None] = lambda request, reply: None,
    ) -> None:
        if not section.addresses:
            raise ValueError("no addresses: take those that served.serving(section) yields")
        self._openai = _openai()
        self._section = section
        self._reader = Reader(tokenizer, eos_ids, vocab_size)
        self._longest = longest
        self._seen = seen
        self._temperatures: set[float] = set()
        self._servers: dict[tuple[str, Keep], Server] = {}
        self._lost: dict[str, str] = {}

    def answer(
        self,
        requests: Sequence[Request],
        settings: GatherSettings,
        progress: Callable[[int], None],
        after: After,
    ) -> list[Record]:
        """Records of all requests and of those that follow them, by request, then by turn.

        A conversation stays at one server, so that its prefix is known there. `progress` is called
        with the tokens of every reply. `settings.batch_size` is not looked at: the section's
        concurrency bounds what is in flight.

        Raises `UserError`, and gives no record at all, if a server refuses a request or does not
        serve this target or this law, or if none is left that answers.
        """
        refuse_rules(requests)
        if settings.keep == "hidden":
            raise UserError("servers tell no states: set collect.distributions to top or none")
        return asyncio.run(self._answer(requests, settings, progress, after))

    async def _answer(
        self,
        requests: Sequence[Request],
        settings: GatherSettings,
        progress: Callable[[int], None],
        after: After,
    ) -> list[Record]:
        if not requests:
            return []
        addresses = dict.fromkeys(self._section.addresses)
        share = math.ceil(len(requests) / len(addresses))
        rows = min(self._section.concurrency, share)
        batch = _Batch(asyncio.Queue(), settings, progress, after, {}, rows)
        for first, request in enumerate(requests):
            batch.queue.put_nowait(_Job(first, request))
        servers = [asyncio.create_task(self._use(address, batch)) for address in addresses]
        finished = asyncio.create_task(batch.queue.join())
        try:
            waiting = {finished, *servers}
            while not finished.done() and len(waiting) > 1:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in servers:
                    if task.done():
                        task.result()  # raises what it raised
            if not finished.done():
                raise UserError(
                    f"no server answers any more; the last one failed so: "
                    f"{list(self._lost.values())[-1]}. Start it again and rerun: what is collected "
                    "is kept"
                )
        finally:
            for task in (finished, *servers):
                task.cancel()
            await asyncio.gather(finished, *servers, return_exceptions=True)
        return [batch.done[place] for place in sorted(batch.done)]

    # ---- one server

    async def _use(self, address: str, batch: _Batch) -> None:
        """Let the server at an address answer; returns when it no longer does."""
        async with self._openai.AsyncOpenAI(
            base_url=_root(address) + "/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            timeout=self._openai.Timeout(self._section.timeout, connect=CONNECT),
            max_retries=self._section.retries,
        ) as client:
            again, known = address in self._lost, (address, batch.settings.keep)
            if again or known not in self._servers:
                quick = client.with_options(timeout=CONNECT, max_retries=0) if again else client
                try:
                    self._servers[known] = await self._meet(address, quick, batch.settings)
                except _Down as error:
                    self._lose(address, str(error))
                    return
                self._lost.pop(address, None)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(batch.rows):
                        group.create_task(self._work(self._servers[known], client, batch))
            except ExceptionGroup as found:
                raise found.exceptions[0] from None

    async def _work(self, server: Server, client: Any, batch: _Batch) -> None:
        """Answer one conversation after the other."""
        while True:
            job = await batch.queue.get()
            following: Request | None = job.request
            try:
                while following is not None and server.address not in self._lost:
                    record = await self._ask(server, client, following, batch.settings)
                    batch.done[job.first, record.turn] = record
                    batch.progress(len(record.reply))
                    following = batch.after(record)
            except _Down as error:
                self._lose(server.address, str(error))
            if following is not None:
                batch.queue.put_nowait(_Job(job.first, following))
            batch.queue.task_done()
            if server.address in self._lost:
                return

    def _lose(self, address: str, reason: str) -> None:
        if self._lost.pop(address, None) is None:
            LOG.warning("%s; going on without it", reason)
        self._lost[address] = reason  # as the last one

    async def _ask(
        self, server: Server, client: Any, request: Request, settings: GatherSettings
    ) -> Record:
        law = request.law
        server.dialect.check(law, server.address)
        top = settings.top if settings.keep == "top" else 0
        if top and server.of_law and law.truncates:
            raise UserError(
                f"{server.address} tells log-probabilities of what {law.label} leaves, not of the "
                "whole vocabulary; start vLLM with --logprobs-mode raw_logprobs, SGLang with "
                "SGLANG_RETURN_ORIGINAL_LOGPROB=1"
            )
        if top:
            self._one_temperature(server, law)
        query = Query(request, server.model, settings.max_new_tokens, self._reader.eos_ids, top)
        told = await self._complete(server, client, query)
        return self._reader.record(query, told, server.address, server.of_law)

    def _one_temperature(self, server: Server, law: Law) -> None:
        """Records whose log-probabilities are of several temperatures cannot be batched."""
        self._temperatures.add(law.temperature if server.of_law and law.temperature else 1.0)
        if len(self._temperatures) > 1:
            raise UserError(
                f"{server.address} tells log-probabilities of the sampled temperature, and those "
                f"of {', '.join(f'{t:g}' for t in sorted(self._temperatures))} cannot be used "
                "together; start vLLM with --logprobs-mode raw_logprobs, SGLang with "
                "SGLANG_RETURN_ORIGINAL_LOGPROB=1, or collect a single temperature"
            )

    async def _complete(self, server: Server, client: Any, query: Query) -> Told:
        about = f"prompt {query.request.prompt_id}"
        path = server.dialect.path
        url = _root(server.address) + path if path.startswith("/") else path
        sent = client.post(url, body=server.dialect.body(query), cast_to=object)
        reply = await self._received(sent, server.address, about)
        try:
            told = server.dialect.read(reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{server.address} answers {about} otherwise than {server.dialect.name} does "
                f"({error!r})"
            ) from error
        if told.finish not in ("stop", "length"):
            raise _Down(f"{server.address} broke off its reply to {about} ({told.finish})")
        self._seen(query.request, reply)
        return told

    async def _received(self, sent: Awaitable[Any], address: str, about: str) -> Any:
        """What a server answers; the client has tried again where that may help."""
        try:
            return await sent
        except self._openai.APITimeoutError:
            reason = f"gives no answer to {about} in time"
        except self._openai.APIConnectionError as error:
            reason = f"cannot be reached for {about} ({error.__cause__ or error})"
        except self._openai.APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            reason = f"answers {about} with HTTP {error.status_code}: {said or error.message}"
            if error.status_code < 500 and error.status_code not in PASSING:
                raise UserError(f"{address} {reason}") from error
        except ValueError as error:
            raise UserError(f"{address} answers {about} with no JSON ({error})") from error
        raise _Down(f"{address} {reason}")

    # ---- meeting it

    async def _meet(self, address: str, client: Any, settings: GatherSettings) -> Server:
        """Ask a server what it is, and check that it can stand for the target."""
        sent = client.get("/models", cast_to=object)
        listed = await self._received(sent, address, "the question for its models")
        model = _model(listed, self._section.model, address)
        context = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
        if context is not None and context < self._longest:
            raise UserError(
                f"{address} serves a context of {context} tokens, and conversations may have "
                f"{self._longest}: give it a longer one, or set collect.max_length to {context}"
            )
        dialect = DIALECTS.get(str(model.get("owned_by")), OTHER)
        server = Server(address, dialect, model["id"])
        await self._check_tokens(server, client)
        if settings.keep == "top":
            server = replace(server, of_law=await self._of_law(server, client))
        return server

    async def _check_tokens(self, server: Server, client: Any) -> None:
        """Raises `UserError` if a server's tokenizer is another, as far as it shows its own."""
        expected = {PROBE: self._reader.encode(PROBE)}
        ends = {token: self._reader.added.get(token) for token in self._reader.eos_ids}
        expected |= {end.content: [token] for token, end in ends.items() if end is not None}
        for text, ids in expected.items():
            told = await self._tokenised(server, client, text)
            if told is None:
                LOG.warning(
                    "%s has no /tokenize: whether its tokens are the target's is not checked",
                    server.address,
                )
                return
            if told != ids:
                raise UserError(
                    f"{server.address} does not serve this target: it tokenises {text!r} as "
                    f"{told}, the target's tokenizer as {ids}"
                )

    async def _tokenised(self, server: Server, client: Any, text: str) -> list[int] | None:
        """A server's own tokens of a text; None if it does not tell them."""
        if server.dialect is OTHER:  # which may have anything else under that path
            return None
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        body |= {"content": text, "add_special": False, "parse_special": True}  # llama.cpp's words
        sent = client.post(_root(server.address) + "/tokenize", body=body, cast_to=object)
        try:
            return list((await self._received(sent, server.address, "/tokenize"))["tokens"])
        except (UserError, KeyError, TypeError):
            return None

    async def _of_law(self, server: Server, client: Any) -> bool:
        """Whether told log-probabilities are of the sampled temperature: T = 0.5 doubles ratios."""
        rows = []
        for temperature in (1.0, 0.5):
            ids = tuple(self._reader.encode(PROBE))
            request = Request("(a probe)", "", "", ids, Law(temperature), 0)
            query = Query(request, server.model, 1, self._reader.eos_ids, PROBE_TOP)
            told = await self._complete(server, client, query)
            rows.append(dict((told.top or [[]])[0]))
        shared = sorted(rows[0].keys() & rows[1].keys(), key=lambda token: rows[0][token])
        if len(shared) < 2:
            raise UserError(
                f"{server.address} tells no log-probabilities by token id, as collect.distributions"
                ": top needs; vLLM, SGLang and llama.cpp do, or set it to none"
            )
        at_1, at_half = (row[shared[-1]] - row[shared[0]] for row in rows)
        return at_half > 1.5 * at_1


def _root(address: str) -> str:
    """An address without the /v1 that it may have."""
    return address.rstrip("/").removesuffix("/v1")


def _model(listed: Any, wanted: str | None, address: str) -> dict[str, Any]:
    """The entry of the model that is to answer, in a server's list of models."""
    try:
        # vLLM lists adapters beside the model that they are for.
        models = {entry["id"]: entry for entry in listed["data"]}
        own = [name for name, entry in models.items() if not entry.get("parent")]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{address} lists no models; an address is that of an OpenAI-compatible server, such "
            "as http://host:8000/v1"
        ) from error
    if wanted is not None and wanted not in models:
        raise UserError(f"{address} does not serve '{wanted}'{did_you_mean(wanted, models)}")
    if wanted is None and len(own) != 1:
        raise UserError(
            f"{address} serves {', '.join(own) or 'no model'}: name one in collect.server.model"
        )
    return dict(models[own[0] if wanted is None else wanted])


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise UserError(
            "collect.server needs the package openai; pip install draftsmith[server]"
        ) from error
    return openai
