"""`make demo`: build the quickstart artifact, say what came out, serve it, stream one answer.

Uses nothing but the installed `quantkit` command and the standard library, as a user's script would.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUANTKIT = Path(sys.executable).with_name("quantkit")
ARTIFACT = ROOT / "demo" / "artifact"
REVIEW_PENDING = 12
QUESTION = "A customer writes that her parcel arrived damaged. Answer in two sentences."


def main() -> None:
    started = time.monotonic()
    ARTIFACT.parent.mkdir(exist_ok=True)
    build = subprocess.run([QUANTKIT, "build", ROOT / "recipes/quickstart.yaml", "--out", ARTIFACT], check=False)
    if build.returncode not in (0, REVIEW_PENDING):
        sys.exit(build.returncode)
    print()
    subprocess.run([QUANTKIT, "inspect", ARTIFACT], check=True)
    print(f"\nkernels    {kernels()}")
    subprocess.run([QUANTKIT, "review", "status", ARTIFACT], check=False)
    serve_and_ask()
    print(f"\ndemo done in {time.monotonic() - started:.0f} s. Go on with:")
    for command in ("review", "report", "chat", "serve"):
        print(f"  {QUANTKIT.relative_to(ROOT)} {command} {ARTIFACT.relative_to(ROOT)}")


def kernels() -> str:
    """How many kernels the artifact holds for each target."""
    listed = subprocess.run([QUANTKIT, "kernels", "list", ARTIFACT, "--json"], check=True, capture_output=True)
    targets = json.loads(listed.stdout)["targets"]
    return ", ".join(f"{len(each['kernels'])} for {target}" for target, each in targets.items()) or "none"


def serve_and_ask() -> None:
    """Start the server on a free port, wait until it is ready, stream one chat completion, stop it."""
    port = free_port()
    log = (ARTIFACT.parent / "server.log").open("wb")
    command = [QUANTKIT, "serve", ARTIFACT, "--port", str(port), "--served-model-name", "quickstart"]
    server = subprocess.Popen(command, stderr=log)
    try:
        wait_ready(server, port)
        print(f"\nuser       {QUESTION}\nassistant  ", end="", flush=True)
        for piece in stream(port, QUESTION):
            print(piece, end="", flush=True)
        print()
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        log.close()
    if code != 0:
        sys.exit(f"the server ended with {code}; its log is {log.name}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} before it was ready; see demo/server.log")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit("the server was not ready within a minute")


def stream(port: int, question: str):  # type: ignore[no-untyped-def]
    """The answer's text, piece by piece, from the server's event stream."""
    body = {
        "model": "quickstart",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 96,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""


if __name__ == "__main__":
    main()
