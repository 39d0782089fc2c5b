"""Sockets and certificates: whatever cannot be used is refused in one line that says what to do, before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from pipedec.core.errors import UserError
from pipedec.server.listening import Address


def refusal(address: Address) -> str:
    with pytest.raises(UserError) as raised:
        address.check_certificate()
        with address.listening():
            pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.failure_case("M10")
def test_a_port_in_use_is_named() -> None:
    with Address(port=0).listening() as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use: choose another --port" in refusal(Address(port=port))


def test_a_port_is_free_again_at_once() -> None:
    with Address(port=0).listening() as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            first.accept()[0].close()  # this side closes first: its end of the connection stays in TIME_WAIT
    with Address(port=port).listening():
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every port")
@pytest.mark.failure_case("M10")
def test_a_privileged_port_is_refused() -> None:
    assert "needs root's rights" in refusal(Address(port=80))


@pytest.mark.failure_case("M10")
def test_an_address_of_another_machine_or_an_unknown_name_is_refused() -> None:
    assert "is no address of this machine" in refusal(Address(host="192.0.2.1"))
    assert refusal(Address(host="no-such-host.invalid")).startswith("--host no-such-host.invalid: ")


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6")
@pytest.mark.failure_case("M10")
def test_an_ipv6_address() -> None:
    address = Address(host="::1", port=0)
    with address.listening() as listener:
        assert address.url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_the_url_is_one_that_can_be_opened() -> None:
    everywhere, encrypted = Address(host="0.0.0.0", port=0), Address(port=0, ssl_certfile=Path("c"))
    with everywhere.listening() as one, encrypted.listening() as other:
        assert everywhere.url(one) == f"http://127.0.0.1:{one.getsockname()[1]}"
        assert encrypted.url(other) == f"https://127.0.0.1:{other.getsockname()[1]}"


def test_a_unix_socket_takes_the_place_of_one_that_nobody_listens_on(short_directory: Path) -> None:
    path = short_directory / "http.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with Address(uds=path).listening():
        assert "another program listens there" in refusal(Address(uds=path))
    assert not path.exists()
    path.write_text("precious")
    assert "no socket" in refusal(Address(uds=path)) and path.read_text() == "precious"


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def test_certificates(tmp_path: Path) -> None:
    public, key, encrypted, other = (tmp_path / name for name in ("cert.pem", "key.pem", "encrypted.pem", "other.pem"))
    made = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=localhost")
    openssl("req", *made, "-keyout", key, "-out", public)
    openssl("pkcs8", "-topk8", "-in", key, "-out", encrypted, "-passout", "pass:secret")
    other.write_text("-----BEGIN CERTIFICATE-----\nrubbish\n")
    Address(ssl_certfile=public, ssl_keyfile=key).check_certificate()
    Address(ssl_certfile=None).check_certificate()
    assert "--ssl-keyfile: give --ssl-certfile" in refusal(Address(ssl_keyfile=key))
    assert "there is no such file" in refusal(Address(ssl_certfile=tmp_path / "nowhere", ssl_keyfile=key))
    for certificate, own_key in ((public, None), (key, public), (other, key), (public, encrypted)):
        assert "not a certificate in PEM format" in refusal(Address(ssl_certfile=certificate, ssl_keyfile=own_key))
