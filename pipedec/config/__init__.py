"""Configuration from files and the environment, as frozen dataclasses: settings, ``cluster.yaml``, Redis, sizes of models.

With ``cluster.torchrun``, the only package that reads configuration files and environment variables. Does not know what a
partition costs or whether it fits. Exports the names that are used in many places.
"""

from pipedec.config.cluster import ClusterConfig, DeviceConfig, ServerConfig, load_cluster, paper_cluster
from pipedec.config.redis import RedisConfig
from pipedec.config.settings import AUTO, NONE, Settings, settings_options
from pipedec.directories import state_directory

__all__ = [
    "AUTO",
    "NONE",
    "ClusterConfig",
    "DeviceConfig",
    "RedisConfig",
    "ServerConfig",
    "Settings",
    "load_cluster",
    "paper_cluster",
    "settings_options",
    "state_directory",
]
