"""Who can connect to whom."""

import socket
from ipaddress import ip_address


def connects(address: str, port: int) -> bool:
    """Whether something answers there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def own_address() -> str | None:
    """An address of this machine that is not loopback, None where it has none; nothing is sent to find it out."""
    with socket.socket(type=socket.SOCK_DGRAM) as plain:
        try:
            plain.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(plain.getsockname()[0])
    return None if ip_address(found).is_loopback else found
