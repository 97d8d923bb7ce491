"""The HTTP API: routes, and who decides what between a request and the engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import quantkit
from quantkit.errors import RequestError
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.text import ChatText
from quantkit.server.admission import Admission
from quantkit.server.answering import Ticket, respond
from quantkit.server.api_errors import ApiError, bad_request, unavailable
from quantkit.server.choices import Choice
from quantkit.server.formats import Answer, ChatFormat, CompletionFormat, Format
from quantkit.server.generation import Generation, Terms
from quantkit.server.messages import Started
from quantkit.server.metrics import Metrics
from quantkit.server.middleware import KeyCheck, Recording, read_body, refusal
from quantkit.server.params import Limits, check_ids, fit, sampling_params
from quantkit.server.prompts import chat_messages, completion_prompts
from quantkit.server.records import AccessLog
from quantkit.server.requests import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from quantkit.server.supervisor import Supervisor
from quantkit.server.tokenizing import chat_ids, prompt_ids
from quantkit.server.wire import GONE, ClientGone, json_response


@dataclass
class Service:
    """What the routes work with. `started` and `text` are there once the model is loaded."""

    name: str
    supervisor: Supervisor
    metrics: Metrics
    log: AccessLog
    keys: Sequence[str]
    queue_limit: int
    body_limit: int
    request_seconds: float
    started: Started | None = None
    text: ChatText | None = None
    admission: Admission = field(default_factory=lambda: Admission(1, 0))
    created: int = field(default_factory=lambda: int(time.time()))

    def loaded(self, started: Started, text: ChatText) -> None:
        """The model is there: requests may come."""
        self.started, self.text = started, text
        self.admission = Admission(started.max_num_seqs, self.queue_limit)

    def model(self, asked: str | None = None) -> tuple[Started, ChatText, Limits]:
        """The loaded model.

        Raises:
            ApiError: 503 while it is loading, 404 when `asked` is another one's name.
        """
        if self.started is None or self.text is None:
            raise unavailable("the model is loading")
        if asked is not None and asked != self.name:
            raise ApiError(
                404, f"the model {asked!r} is not served here; {self.name!r} is", param="model", code="model_not_found"
            )
        return self.started, self.text, Limits(self.started.max_model_len, self.started.vocab_size)

    def trouble(self) -> str:
        """Why the server is not ready; empty when it is."""
        if self.admission.draining:
            return "the server is shutting down"
        return self.supervisor.trouble()


def build_app(service: Service) -> ASGIApp:
    """The application with everything around it."""
    app = FastAPI(
        title="quantkit",
        version=quantkit.__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    routes = Routes(service)
    for path, handler in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.completions),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.add_route(path, handler, methods=["POST"])
    for path, handler in (
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
    ):
        app.add_route(path, handler, methods=["GET"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    app.add_exception_handler(ClientGone, _client_gone)
    return Recording(KeyCheck(app, service.keys), service.log)


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        parsed = await self._parsed(request, ChatRequest)
        _, text, limits = self._service.model(parsed.model)
        messages = chat_messages(parsed.messages)
        params = sampling_params(parsed, text, limits)
        generate = parsed.add_generation_prompt is not False

        async def prepare() -> tuple[list[list[int]], Format]:
            return [await chat_ids(text, messages, limits, generation_prompt=generate)], ChatFormat(text)

        return await self._generate(request, parsed, params, 1, prepare)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        parsed = await self._parsed(request, CompletionRequest)
        _, text, limits = self._service.model(parsed.model)
        params = sampling_params(parsed, text, limits)
        prompts = completion_prompts(parsed, limits)

        async def prepare() -> tuple[list[list[int]], Format]:
            ids = [p if isinstance(p, list) else await prompt_ids(text, p, limits) for p in prompts]
            texts = [text.decode(p) if isinstance(p, list) else p for p in prompts] if parsed.echo else []
            each = parsed.n or 1
            return ids, CompletionFormat(text, {i: texts[i // each] for i in range(len(texts) * each)})

        return await self._generate(request, parsed, params, len(prompts), prepare)

    async def _generate(
        self,
        request: Request,
        parsed: ChatRequest | CompletionRequest,
        params: SamplingParams,
        prompts: int,
        prepare: Callable[[], Awaitable[tuple[list[list[int]], Format]]],
    ) -> Response:
        """Admit the request, then tokenize (`prepare`), generate and answer; `prompts` times n choices."""
        service, record = self._service, request.scope["record"]
        _, text, limits = service.model()
        trouble = service.supervisor.dead()
        if trouble:
            raise unavailable(trouble)
        each = parsed.n or 1
        ticket = Ticket(service.admission, prompts * each, record, service.metrics)
        try:
            prompt_ids, form = await prepare()
            chat = isinstance(parsed, ChatRequest)
            most = [fit(params, len(ids), limits, chat=chat) for ids in prompt_ids]
            choices = [Choice(i, prompt_ids[i // each], text, params) for i in range(prompts * each)]
            terms = Terms(params, parsed.priority or 0, parsed.deadline_ms, parsed.cache_salt or "")
            generation = Generation(
                choices,
                [most[i // each] for i in range(len(choices))],
                terms,
                supervisor=service.supervisor,
                record=record,
                metrics=service.metrics,
            )
            answer = Answer(service.name, generation, form, record.request_id)
            usage = parsed.stream_options is not None and bool(parsed.stream_options.include_usage)
            return await respond(request, answer, ticket, stream=bool(parsed.stream), include_usage=usage)
        except BaseException as error:
            ticket.close_after(error)
            raise

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        parsed = await self._parsed(request, TokenizeRequest)
        _, text, limits = self._service.model(parsed.model)
        if (parsed.prompt is None) == (parsed.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if parsed.messages is not None:
            messages = chat_messages(parsed.messages)
            generate = parsed.add_generation_prompt is not False
            ids = await chat_ids(text, messages, limits, generation_prompt=generate)
        else:
            ids = await prompt_ids(text, parsed.prompt or "", limits, special=parsed.add_special_tokens is not False)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": limits.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        parsed = await self._parsed(request, DetokenizeRequest)
        _, text, limits = self._service.model(parsed.model)
        check_ids(parsed.tokens, limits, "tokens")
        return json_response({"prompt": text.decode(parsed.tokens, skip_special=False)})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._service.model(request.path_params["name"])
        return json_response(self._card())

    async def health(self, request: Request) -> Response:
        """GET /health: this process answers."""
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: a request sent now would be served."""
        trouble = self._service.trouble()
        return json_response({"ready": not trouble, "reason": trouble or None}, 503 if trouble else 200)

    async def version(self, request: Request) -> Response:
        """GET /version: what is served, and what was found out about it."""
        started, _, _ = self._service.model()
        return json_response(
            {
                "version": quantkit.__version__,
                "model": self._service.name,
                "payload_digest": started.payload_digest,
                "verdict": started.verdict,
                "coverage": started.coverage,
                "backend": started.backend,
                "kv_format": started.kv_format,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: Prometheus text."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _parsed(self, request: Request, kind: type[Body]) -> Body:
        return parse(await read_body(request, self._service.body_limit, self._service.request_seconds), kind)

    def _card(self) -> dict[str, Any]:
        started, _, _ = self._service.model()
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "quantkit",
            "max_model_len": started.max_model_len,
        }


async def _api_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        error = bad_request(error.line())
    if not isinstance(error, ApiError):
        raise error
    request.scope["record"].error = error.message
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}.get(status)
    return refusal(ApiError(status, message or str(error)))


async def _internal_error(request: Request, error: Exception) -> Response:
    request.scope["record"].error = repr(error)
    return refusal(ApiError(500, "internal error; the server's log has the details"))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)
