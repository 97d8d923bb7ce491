"""What the HTTP front and the engine core process say to each other: typed msgpack over one ZeroMQ pair.

Front to engine: `Start` (on its standard input), then `Submit` and `Abort`, at last `Shutdown`. Engine to front:
`Started` or `Failed`, then a `Report` after every step, or twice a second when idle, which is also the proof that the
scheduler moves.
"""

from __future__ import annotations

import msgspec

from quantkit.artifact.marks import Mark
from quantkit.runtime.engine import EngineStats
from quantkit.runtime.request import EngineRequest, RequestOutput


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and within which limits, as `runtime.load.EngineOptions` has them; None: its default."""

    model: str
    """An artifact's folder, or the location of a source model to serve unquantized."""
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_gib: float | None = None
    enable_prefix_caching: bool = True
    threads: int | None = None
    backend: str | None = None
    accept_ungated: bool = False


class Start(msgspec.Struct, frozen=True):
    """Load this. `scratch` is a folder that lives until the front has read it."""

    options: LoadOptions
    scratch: str


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Generate this. Stop strings are the front's business and stay there."""

    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Forget these requests; unknown or ended ones are no error. `finished`: they got all they wanted."""

    request_ids: list[str]
    finished: bool = False


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Leave the loop and exit 0."""


class Started(msgspec.Struct, tag="started", array_like=True, frozen=True, kw_only=True):
    """What was loaded. `payload_digest` is empty and `verdict` none for an unquantized source.

    text_folder: where tokenizer and chat template lie. marks: of the artifact's files there, read by the front as well.
    """

    text_folder: str
    marks: dict[str, Mark]
    payload_digest: str
    verdict: str
    coverage: dict[str, str]
    backend: str
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    kv_format: str
    compute: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Loading failed; the process exits with `exit_code` after this."""

    message: str
    exit_code: int


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True):
    """After a step, or twice a second without work. `step_seconds` is 0 when no step was made.

    A request the engine would not take ends with finish reason `refused`.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    step_seconds: float


ToEngine = Submit | Abort | Shutdown
FromEngine = Started | Failed | Report

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
