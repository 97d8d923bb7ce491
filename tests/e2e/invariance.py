"""Is a logits row the same whatever shares its step? SHA-256 of every request's rows, served six ways.

    python -m tests.e2e.invariance ARTIFACT [--steps 256] [--threads N]

prints one line a way of serving and exits 1 when any digest differs. INT8 cache and packed weights as served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.runtime.engine import EngineCore
from quantkit.runtime.executor import Executor
from quantkit.runtime.request import EngineRequest
from quantkit.runtime.sampling import SamplingParams
from tests.e2e.engine_case import LogitsDigest, drain, make_core, prompts

Make = Callable[..., EngineCore]


def digests(executor: Executor, asked: Sequence[Sequence[int]], steps: int) -> dict[str, dict[str, str]]:
    """Way of serving -> request -> digest of its `steps` logits rows.

    Ways: alone; all together; prompts in chunks; with the prefix cached by an earlier run; preempted and recomputed
    (a pool too small for all). The last two are checked to have happened.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps)
    longest = max(map(len, asked)) + steps

    def serve(core: EngineCore, which: Sequence[int]) -> dict[str, str]:
        observer = LogitsDigest()
        core.on_logits = observer
        for i in which:
            core.add_request(EngineRequest(f"{i:02d}", asked[i], params))
        drain(core)
        if set(observer.rows.values()) != {steps}:
            raise RuntimeError(f"rows seen: {dict(observer.rows)}, expected {steps} each")
        return observer.digests()

    every = range(len(asked))
    plain = {"enable_prefix_caching": False}
    found: dict[str, dict[str, str]] = {"alone": {}}
    for i in every:
        found["alone"] |= serve(make_core(executor, **plain), [i])
    found["batch"] = serve(make_core(executor, **plain), every)
    found["chunked"] = serve(make_core(executor, **plain, max_num_batched_tokens=len(asked) + 7), every)
    core = make_core(executor)
    serve(core, every)
    found["prefix hits"] = serve(core, every)
    if core.stats().prefix_hits == 0:
        raise RuntimeError("no prefix was hit")
    small = 2 + 2 * -(-longest // 16)
    core = make_core(executor, **plain, admission="max-utilization", num_blocks=small)
    found["preempted"] = serve(core, every)
    if core.stats().preemptions == 0:
        raise RuntimeError("nothing was preempted")
    return found


def differing(found: dict[str, dict[str, str]]) -> list[str]:
    """Ways whose digests are not those of `alone`."""
    return [way for way, got in found.items() if got != found["alone"]]


def main() -> int:
    """The command line."""
    from quantkit.artifact.read import open_artifact
    from quantkit.runtime.load import EngineOptions, load_executor
    from quantkit.runtime.text import ChatText

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    artifact = open_artifact(args.artifact)
    options = EngineOptions(max_model_len=128 + args.steps, threads=args.threads)
    executor, _, _ = load_executor(artifact.program, artifact, options)
    vocab = ChatText(artifact.folder).vocab_size
    found = digests(executor, prompts(16, low=20, high=100, vocab=vocab), args.steps)
    print(f"{executor.backend_name}, KV {artifact.program.kv[0].format}, 16 requests, {args.steps} rows each")
    for way, got in found.items():
        same = "same as alone" if got == found["alone"] else "DIFFERS"
        print(f"{way:12s} {same}  first request {got['00'][:16]}")
    return 1 if differing(found) else 0


if __name__ == "__main__":
    sys.exit(main())
