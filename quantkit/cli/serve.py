"""`quantkit serve`: an artifact behind an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quantkit.server.messages import Started


def serve(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder, or an unquantized source.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 8000,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a step at most.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step at most.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Memory for the KV cache, GiB.")] = None,
    no_prefix_caching: Annotated[bool, typer.Option("--no-prefix-caching", help="Compute every prompt anew.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.")] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu or reference.")] = "auto",
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="QUANTKIT_API_KEY", help="Key callers must bring.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen in public without a key.")] = False,
    accept_ungated: Annotated[bool, typer.Option("--accept-ungated", help="Serve without a covering verdict.")] = False,
    served_model_name: Annotated[str, typer.Option(help="Name in the API; default: the folder's.")] = "",
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time to finish running requests on SIGTERM.")] = 30.0,
    queue_limit: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more get 429.")] = 256,
    request_seconds: Annotated[float, typer.Option(min=1, help="Time a client has to send its request.")] = 60.0,
    hang_seconds: Annotated[float, typer.Option(min=2, help="Silence that has a stuck engine restarted.")] = 120.0,
) -> int:
    """Serve an artifact over an OpenAI-compatible API."""
    from quantkit.server.lifecycle import ServeConfig
    from quantkit.server.lifecycle import serve as run
    from quantkit.server.messages import LoadOptions
    from quantkit.server.supervisor import Patience

    def announce(started: Started, url: str) -> None:
        for name, value in _table(artifact, started, url):
            typer.echo(f"{name:>14}  {value}")
        typer.echo("ready")

    return run(
        ServeConfig(
            LoadOptions(
                model=str(artifact),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_gib=kv_cache_gib,
                enable_prefix_caching=not no_prefix_caching,
                threads=threads,
                backend=backend,
                accept_ungated=accept_ungated,
            ),
            host=host,
            port=port,
            keys=tuple(api_key or ()),
            insecure=insecure,
            served_model_name=served_model_name,
            queue_limit=queue_limit,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            patience=Patience(hung=hang_seconds),
        ),
        announce,
    )


def _table(model: Path, started: Started, url: str) -> list[tuple[str, str]]:
    limits = (
        f"{started.max_num_seqs} sequences, {started.max_num_batched_tokens} tokens a step, "
        f"{started.max_model_len} tokens a sequence"
    )
    return [
        ("model", str(model)),
        ("payload", started.payload_digest or "unquantized source"),
        ("verdict", started.verdict),
        ("backend", f"{started.backend}, {started.compute} compute"),
        ("weights", f"{started.weight_bytes / 1e6:.1f} MB"),
        ("KV cache", f"{started.kv_tokens} tokens, {started.kv_bytes / 1e6:.1f} MB, {started.kv_format}"),
        ("limits", limits),
        ("URL", url),
    ]
