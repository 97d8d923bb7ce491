import os
import socket
import subprocess
import sys

import pytest

from quantkit.errors import PreflightError, RecipeError
from quantkit.server.binding import check_keys, listen


def test_a_taken_port_names_the_process_that_has_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PreflightError, match=rf"port {port} is taken by process \S+ \(pid {os.getpid()}\)"
        ) as caught:
            listen("127.0.0.1", port, keyless=True, insecure=False)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(RecipeError, match="no API key") as caught:
        listen(host, 0, keyless=True, insecure=False)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("keyless", "insecure"), [(False, False), (True, True)])
def test_a_public_address_with_a_key_or_the_users_word_is_taken(keyless, insecure):
    listen("0.0.0.0", 0, keyless=keyless, insecure=insecure).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_needs_no_key(host):
    listen(host, 0, keyless=True, insecure=False).close()


@pytest.mark.parametrize(("host", "port"), [("not a host", 1), ("127.0.0.1", 70000)])
def test_an_address_that_is_none_is_refused(host, port):
    with pytest.raises(RecipeError, match=r"cannot listen|not a port"):
        listen(host, port, keyless=True, insecure=False)


def test_the_front_imports_neither_torch_nor_transformers():
    code = "import sys, quantkit.server.lifecycle; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("key", ["", " ", " secret"])
def test_a_key_that_would_guard_nothing_is_refused(key):
    check_keys(["secret"])
    with pytest.raises(RecipeError, match="empty or has spaces"):
        check_keys(["secret", key])
