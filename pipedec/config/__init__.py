"""Configuration from files and the environment, as frozen dataclasses: ``cluster.yaml``, Redis, model sizes, directories.

With ``cluster.torchrun``, the only package that reads configuration files and environment variables. Does not know what a
partition costs or whether it fits.
"""

from pipedec.config.cluster import (
    PLANNED_MODEL_LEN,
    ClusterConfig,
    DeviceConfig,
    LaunchConfig,
    NetworkConfig,
    PartitionConfig,
    ServerConfig,
    cluster_from,
    cluster_from_json,
    cluster_to_json,
    load_cluster,
    paper_cluster,
)
from pipedec.config.environment import (
    RANK_ENVIRONMENT,
    captures_graphs,
    configured_interface,
    environment_with,
    onednn_limit,
    optional_secret,
    secret_from_environment,
    set_rank_environment,
    ssh_program,
    state_directory,
    transport_environment,
)
from pipedec.config.files import load_json
from pipedec.config.model import checkpoint_dtype, context_length, json_object, model_json, model_shape
from pipedec.config.model_config import LENGTH_DEPENDENT, ModelConfig
from pipedec.config.redis import RedisConfig, redis_config, redis_url_from_environment
from pipedec.config.settings import (
    AUTO,
    DEVICES,
    NONE,
    Cluster,
    Cut,
    Limits,
    LogLevel,
    Models,
    Numbers,
    Settings,
    given_settings,
    settings_options,
)
from pipedec.validation import parse_json

__all__ = [
    "AUTO",
    "DEVICES",
    "LENGTH_DEPENDENT",
    "NONE",
    "PLANNED_MODEL_LEN",
    "RANK_ENVIRONMENT",
    "Cluster",
    "ClusterConfig",
    "Cut",
    "DeviceConfig",
    "LaunchConfig",
    "Limits",
    "LogLevel",
    "ModelConfig",
    "Models",
    "NetworkConfig",
    "Numbers",
    "PartitionConfig",
    "RedisConfig",
    "ServerConfig",
    "Settings",
    "captures_graphs",
    "checkpoint_dtype",
    "cluster_from",
    "cluster_from_json",
    "cluster_to_json",
    "configured_interface",
    "context_length",
    "environment_with",
    "given_settings",
    "json_object",
    "load_cluster",
    "load_json",
    "model_json",
    "model_shape",
    "onednn_limit",
    "optional_secret",
    "paper_cluster",
    "parse_json",
    "redis_config",
    "redis_url_from_environment",
    "secret_from_environment",
    "set_rank_environment",
    "settings_options",
    "ssh_program",
    "state_directory",
    "transport_environment",
]  # fmt: skip
