"""services/lan on the library zeroconf (extra `lan`), which has threads of its own. The only file that imports it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swarmnode.config import LanConfig
from swarmnode.errors import MissingExtraError, UsageError
from swarmnode.services.lan import ID_FIELD, SERVICE_TYPE, LanService

if TYPE_CHECKING:
    from zeroconf import ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

log = logging.getLogger(__name__)


class ZeroconfBackend:
    """Multicast DNS on all interfaces, or on `interfaces` (IP addresses)."""

    def __init__(self, config: LanConfig, interfaces: Sequence[str] | None = None) -> None:
        self._timeout_ms = int(1000 * config.resolve_timeout_s)
        self._interfaces = interfaces
        self._zeroconf: Zeroconf | None = None
        self._browser: ServiceBrowser | None = None

    def start(self, own: LanService | None, on_seen: Callable[[LanService], None]) -> None:
        """See LanBackend."""
        try:
            from zeroconf import InterfaceChoice, ServiceBrowser, Zeroconf
        except ImportError:
            raise MissingExtraError("--lan", "lan") from None
        try:
            zeroconf = Zeroconf(interfaces=self._interfaces or InterfaceChoice.All)
        except OSError as error:
            raise UsageError(f"no multicast on this machine: {error}") from error
        self._zeroconf = zeroconf
        if own is not None:
            zeroconf.register_service(_info(own), cooperating_responders=False)
        self._browser = ServiceBrowser(zeroconf, SERVICE_TYPE, handlers=[_reader(on_seen, self._timeout_ms)])

    def close(self) -> None:
        """See LanBackend."""
        browser, self._browser = self._browser, None
        zeroconf, self._zeroconf = self._zeroconf, None
        if browser is not None:
            browser.cancel()  # waits for its thread
        if zeroconf is not None:
            zeroconf.close()  # withdraws the announcement, too


def hosts_of(listen_host: str) -> tuple[str, ...]:
    """The IP addresses to announce for a host that is listened on: all of this machine's but loopback for 0.0.0.0.

    Raises UsageError if the library is missing.
    """
    if listen_host not in ("", "0.0.0.0", "::"):
        return (listen_host,)
    try:
        import ifaddr  # zeroconf depends on it
    except ImportError:
        raise MissingExtraError("--lan", "lan") from None
    found = []
    for adapter in ifaddr.get_adapters():
        for item in adapter.ips:
            host = item.ip if isinstance(item.ip, str) else item.ip[0]
            if not host.startswith("127.") and host != "::1" and not host.lower().startswith("fe80"):
                found.append(host)
    return tuple(found)


def _reader(on_seen: Callable[[LanService], None], timeout_ms: int) -> Callable[..., None]:
    """What zeroconf calls, by keywords and on a thread of its own, when an announcement comes, changes or goes."""

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change.name == "Removed":
            return  # who is gone is found out by dialling
        try:
            info = zeroconf.get_service_info(service_type, name, timeout=timeout_ms)
        except Exception:  # whatever a stranger's packet does to the library: this one is not found
            log.exception("a LAN announcement could not be read")
            return
        if info is not None and info.port is not None:
            fields = {key: value for key, value in info.decoded_properties.items() if value is not None}
            on_seen(LanService(tuple(info.parsed_addresses()), info.port, fields))

    return changed


def _info(service: LanService) -> ServiceInfo:
    from zeroconf import ServiceInfo

    name = service.fields[ID_FIELD]  # 52 characters; a label of DNS may have 63
    packed = [
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in service.hosts
    ]
    return ServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        addresses=packed,
        port=service.port,
        properties=dict(service.fields),
        server=f"swarmnode-{name[:16]}.local.",
    )
