"""Network addresses and the names of hosts."""

from __future__ import annotations

import pytest

from serve_app.config.addresses import host_name, is_loopback, network_of


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_host_names() -> None:
    assert host_name(" Corral.Example.:80 ") == "corral.example"
    assert host_name("[FD00::1]:80") == "fd00::1"
    assert host_name(".") is None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_whoever_has_an_address_has_its_network(address: str, network: str) -> None:
    assert network_of(address) == network
