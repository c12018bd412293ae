"""Where a node keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs


@dataclass(frozen=True)
class Folders:
    """Where a node keeps things. `data`: the key; `cache`: slices and manifests; `settings`: peer lists."""

    data: Path
    cache: Path
    settings: Path

    @staticmethod
    def under(home: Path | None) -> Folders:
        """The platform's usual folders, or everything under `home` (`--home`, SWARMNODE_HOME).

        Several nodes of one user on one machine need a home each: a key belongs to one running node.
        """
        if home is None:
            return Folders(
                platformdirs.user_data_path("swarmnode", appauthor=False),
                platformdirs.user_cache_path("swarmnode", appauthor=False),
                platformdirs.user_config_path("swarmnode", appauthor=False),
            )
        return Folders(home / "data", home / "cache", home / "config")

    @property
    def models(self) -> tuple[Path, ...]:
        """Where models are looked for by name: the current folder (not below it), `models` in the cache folder."""
        return Path(), self.cache / "models"

    @property
    def key_file(self) -> Path:
        """The node's Ed25519 key."""
        return self.data / "node.key"

    @property
    def port_file(self) -> Path:
        """The port at which others know this node, if it was free to choose one."""
        return self.data / "listen.port"

    @property
    def control_socket(self) -> Path:
        """Where a running node listens to its owner (net/control_socket)."""
        return self.data / "control.sock"

    @property
    def token_file(self) -> Path:
        """What the node-local HTTP routes ask for (services/node_token)."""
        return self.data / "api.token"

    @property
    def api_keys_file(self) -> Path:
        """Hashes of the API's keys (services/api_keys)."""
        return self.data / "api-keys.json"

    def address_book(self, tag: bytes) -> Path:
        """Peers met in earlier runs in the network of this tag (wire/secret.network_tag)."""
        return self.data / f"peers-met-{tag.hex()[:8]}.txt"

    @property
    def secret_file(self) -> Path:
        """The secret of the private network that this node is in, unless another is given."""
        return self.settings / "network.secret"
