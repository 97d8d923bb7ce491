"""Serve an artifact under mixed load and say whether memory, descriptors, threads or KV blocks are lost over time.

    python tools/leak_check.py demo/artifact [--minutes 10] [--clients 8] [--out TABLE.md] [-- SERVE OPTIONS]

Starts `quantkit serve` and lets clients send everything at once for the time given: streams and whole answers, short
and long prompts, shared prefixes, sampling parameters, several choices, log probabilities, stop strings, deadlines,
callers that leave while they wait or read, and requests that must be refused. Every second it notes the anonymous
memory, descriptors and threads of both processes and what /metrics says. Then the load stops and the server is ended.
Exit code 0 if, for each process and in `/metrics`,

- from the end of the first third on, memory rose by at most 8 MiB, and by at most 1 MiB a minute in a straight line
  fitted to the samples since;
- at rest there are as many descriptors as before the load, and never more threads than in the first third;
- the sum of free, cached and used blocks never changed; at rest none is used and nothing runs, waits or is in flight;
- every accepted request ended, none failed but by its own deadline, none of the engine's processes died, and no answer
  was anything but what its request asks for.

Without SERVE OPTIONS the cache is small, for SmolLM2-135M: its memory is touched once and early, cached blocks are
evicted, requests wait. What a server keeps from the first time only (words in its tokenizer's caches) it gets before.
In a minute or two what happens once, a heap's growth to its largest use, can look like a slope.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from mixed_load import Client
from prometheus_client.parser import text_string_to_metric_families

QUANTKIT = Path(sys.executable).with_name("quantkit")
SMALL = ("--max-num-seqs", "8", "--max-model-len", "2048", "--kv-cache-gib", "0.0625")
MIB_IN_ALL, MIB_A_MINUTE = 8.0, 1.0
LEVEL = 10
"""Samples whose median is the memory at a moment."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--csv", type=Path, help="file for the samples")
    parser.add_argument("serve", nargs="*", default=list(SMALL), metavar="SERVE OPTIONS")
    args = parser.parse_args()
    with tempfile.TemporaryFile("w+") as log, Server(args.artifact, args.serve, log) as server:
        first = Client(server.url, args.seed)
        first.begin()
        before = server.rested()
        counts, trouble = load(server, args.clients, 60 * args.minutes, args.seed)
        counts += first.counts
        samples, after = server.samples, server.rested()
        code = server.end()
        log.seek(0)
        traces = log.read().count("Traceback")
    if args.csv:
        write(args.csv, samples)
    ended = "quantkit_requests_ended_total"
    failed, aborted = (after.total(ended, outcome=outcome) for outcome in ("failed", "aborted"))
    checks = [
        *growth(samples),
        *kept(samples, before, after),
        ("every accepted request ended", after.total(ended) == after.total("quantkit_requests_accepted_total")),
        ("none failed but by its deadline", failed == counts["too late"]),
        ("none was aborted but by its caller", aborted <= counts["left reading"] + counts["left waiting"]),
        ("every answer was as asked", not trouble),
        ("no engine died", after.total("quantkit_engine_deaths_total") == 0),
        ("the server ended well and logged no traceback", code == 0 and traces == 0),
    ]
    lines = [
        *table(samples, before, after),
        "",
        ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
        "",
        *(f"- {'ok' if holds else '**FAIL**'}: {name}" for name, holds in checks),
    ]
    print("\n".join([*lines, *trouble[:5]]))
    if args.out:
        args.out.write_text("\n".join([f"Made by `python {' '.join(sys.argv)}`.", "", *lines, ""]))
    sys.exit(not all(holds for _, holds in checks))


@dataclass
class Sample:
    """One moment. By process, front and engine: anonymous memory in MiB, descriptors, threads."""

    seconds: float
    memory: tuple[float, float]
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    metrics: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's values whose labels include `labels`."""
        return sum(v for (metric, has), v in self.metrics.items() if metric == name and labels.items() <= set(has))

    @property
    def busy(self) -> float:
        """What stands in the way of rest: requests and blocks in use."""
        counted = ("quantkit_requests_in_flight", "quantkit_requests_running", "quantkit_requests_waiting")
        return sum(map(self.total, counted)) + self.total("quantkit_kv_blocks", state="used")


class Server:
    """`quantkit serve`, ready; a sample is taken every second from then on."""

    def __init__(self, artifact: Path, options: list[str], log: Any) -> None:
        command: list[str | Path] = [QUANTKIT, "serve", artifact, "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        words = [
            line.split() for line in itertools.takewhile(lambda line: line.strip() != "ready", self._process.stdout)
        ]
        urls = [line[1] for line in words if line[:1] == ["URL"]]
        if not urls:
            log.seek(0)
            sys.exit(f"the server did not start:\n{log.read()}")
        self.url = urls[0]
        self._pids = (self._process.pid, engine_of(self._process.pid))
        self._http = httpx.Client(base_url=self.url, timeout=60)
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def sample(self) -> Sample:
        """Both processes now."""
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        values = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
        front, engine = (Path("/proc") / str(pid) for pid in self._pids)
        return Sample(
            time.monotonic() - self._began,
            (anonymous(front), anonymous(engine)),
            (count(front / "fd"), count(engine / "fd")),
            (count(front / "task"), count(engine / "task")),
            values,
        )

    def watch(self, over: threading.Event) -> None:
        """Sample every second until `over`."""
        self._began = time.monotonic()
        for second in itertools.count(1):
            self.samples.append(self.sample())
            if over.wait(max(0.0, self._began + second - time.monotonic())):
                return

    def rested(self) -> Sample:
        """The first moment at which nothing is in use, or that of a minute later; connections have closed by then."""
        end = time.monotonic() + 60
        while self.sample().busy and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(2)
        return self.sample()

    def end(self) -> int:
        """Stop it as an init system does; its exit code."""
        self._http.close()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)


def engine_of(pid: int) -> int:
    """The one child of a process."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    [engine] = map(int, children)
    return engine


def anonymous(process: Path) -> float:
    """MiB of anonymous memory."""
    fields = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) / 1024


def count(folder: Path) -> int:
    """Entries of a folder."""
    return sum(1 for _ in folder.iterdir())


def load(server: Server, clients: int, seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Run clients for `seconds` while the server is watched: how often what happened, and what should not have."""
    callers = [Client(server.url, seed + 1 + number) for number in range(clients)]
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(over,)) for work in (server.watch, *(c.many for c in callers))]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return sum((c.counts for c in callers), Counter()), [line for c in callers for line in c.trouble]


def level(samples: list[Sample], process: int) -> float:
    """Memory at the end of `samples`."""
    return statistics.median(sample.memory[process] for sample in samples[-LEVEL:])


def slope(samples: list[Sample], process: int) -> float:
    """MiB a minute of the line fitted to `samples`."""
    return float(np.polyfit([s.seconds / 60 for s in samples], [s.memory[process] for s in samples], 1)[0])


NAMES = ("front", "engine")


def growth(samples: list[Sample]) -> Iterator[tuple[str, bool]]:
    """Whether memory stayed where the first third left it."""
    third = len(samples) // 3
    for process, name in enumerate(NAMES):
        more, rate = level(samples, process) - level(samples[:third], process), slope(samples[third:], process)
        yield (
            f"memory of the {name}: {more:+.1f} MiB (at most {MIB_IN_ALL:g}), "
            f"{rate:+.2f} a minute (at most {MIB_A_MINUTE:g})",
            more <= MIB_IN_ALL and rate <= MIB_A_MINUTE,
        )


def kept(samples: list[Sample], before: Sample, after: Sample) -> Iterator[tuple[str, bool]]:
    """Whether descriptors, threads and blocks are as many as there were."""
    third = len(samples) // 3
    for process, name in enumerate(NAMES):
        had, has = before.descriptors[process], after.descriptors[process]
        yield f"descriptors of the {name} at rest: {had} before, {has} after", has <= had
        first, rest = (max(s.threads[process] for s in part) for part in (samples[:third], samples[third:]))
        yield f"threads of the {name}: {first} in the first third, {rest} after", rest <= first
    blocks = {int(sample.total("quantkit_kv_blocks")) for sample in (before, *samples, after)}
    yield f"blocks: {', '.join(map(str, sorted(blocks)))} at all times, none used at rest", len(blocks) == 1
    yield "nothing runs, waits or is in flight at rest", after.busy == 0


def table(samples: list[Sample], before: Sample, after: Sample) -> list[str]:
    """Memory over time as Markdown."""
    lines = [
        "| minute | front, MiB | engine, MiB | running | waiting | blocks used | cached | free |",
        "|---" * 8 + "|",
    ]
    tenth = max(1, len(samples) // 10)
    for shown in (before, *samples[tenth - 1 :: tenth], after):
        when = "before" if shown is before else "after" if shown is after else f"{shown.seconds / 60:.1f}"
        blocks = [shown.total("quantkit_kv_blocks", state=state) for state in ("used", "cached", "free")]
        counts = [shown.total(f"quantkit_requests_{name}") for name in ("running", "waiting")]
        cells = [f"{shown.memory[0]:.1f}", f"{shown.memory[1]:.1f}", *(f"{value:.0f}" for value in counts + blocks)]
        lines.append("| " + " | ".join([when, *cells]) + " |")
    return lines


def write(path: Path, samples: list[Sample]) -> None:
    """The samples as CSV."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["seconds", *(f"{name} {what}" for what in ("MiB", "descriptors", "threads") for name in NAMES)])
        for s in samples:
            out.writerow([f"{s.seconds:.1f}", *(f"{m:.2f}" for m in s.memory), *s.descriptors, *s.threads])


if __name__ == "__main__":
    main()
