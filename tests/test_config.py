"""Configuration and hardware: every mistake gives one line that names the file, the key and what it may be."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import FAMILIES, save_tiny

from pipedec.config import ClusterConfig, RedisConfig, load_cluster, state_directory
from pipedec.config.cluster import cluster_from_json, cluster_to_json
from pipedec.config.redis import redis_config
from pipedec.core.errors import UserError
from pipedec.families import FAMILIES as SUPPORTED
from pipedec.families import KNOWN_MODELS, model_by_name
from pipedec.formats import ROUNDED, WeightFormat
from pipedec.hardware import DEVICES, reported_device
from pipedec.methods import LayerTreeOptions
from pipedec.plan.held import HeldWeights, held
from pipedec.plan.roofline import pass_time

ROOT = Path(__file__).resolve().parent.parent
GOOD = """\
target: llama-3.1-8b
servers:
  - {host: alpha, devices: {rtx3090: 4}}
partitions:
  small: {stages: 4}
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIPEDEC_REDIS_URL", "PIPEDEC_REDIS_PASSWORD", "PIPEDEC_STATE_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def load(tmp_path: Path, text: str) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_cluster(file)


def message(tmp_path: Path, text: str) -> str:
    """The error for ``text``, without the folder of the file."""
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{tmp_path}/")


def test_paper_cluster_loads() -> None:
    config = load_cluster(ROOT / "cluster.yaml")
    assert (config.target, config.draft, config.settings.numbers.dtype) == ("llama-3.1-70b", "llama-3.2-1b", "float32")
    assert config.settings.limits.tree == LayerTreeOptions(width=32, children=16)
    paper, home, nodes = config.servers[:4], config.servers[4], config.servers[5:]
    assert [dict(server.devices) for server in paper] == [{"rtx3090": 7}, {"rtx3090": 7}, {"rtx4090": 4}, {"l40": 4}]
    assert dict(home.devices) == {"rtx3090": 4, "rtx4090": 2, "cpu": 1}
    assert [(node.host, dict(node.devices)) for node in nodes] == [(f"node-{number}", {"rtx3090": 2}) for number in range(1, 8)]
    shapes = {
        name: (part.settings.cut.stages, part.settings.cut.num_groups)
        for name, part in config.partitions.items()
        if part.settings.numbers.dtype == "float32"
    }
    others = {"home-2x3090", "home-4x3090", "mixed-3090-4090", "7x2-3090", "7x2-3090-own-draft"}
    assert set(config.partitions) - set(shapes) == others
    assert shapes == {"paper-14": (14, 14), "paper-7": (14, 7), "paper-21": (21, 21), "auto-14": (14, 14), "auto-21": (21, 21)}
    assert config.find_partition()[0] == "paper-14"


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert (config.draft, config.settings.limits.max_model_len, config.redis) == ("none", 4096, RedisConfig())
    assert config.find_partition()[0] == "small"
    assert config.partitions["small"].settings.cut.layers == "auto"
    limits = config.settings.limits
    assert (limits.max_num_seqs, limits.max_waiting) == (64, 1000)
    assert (limits.kv_cache_bytes, limits.prefix_cache) == (None, True)


def test_a_kv_budget_is_a_size(tmp_path: Path) -> None:
    for size, num_bytes in (("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("1000000", 1_000_000)):
        limits = load(tmp_path, GOOD + f"kv_cache_memory: {size}\nprefix_cache: false\n").settings.limits
        assert (limits.kv_cache_bytes, limits.prefix_cache) == (num_bytes, False)


def test_checkpoints_count_from_the_file(tmp_path: Path) -> None:
    """Without "./" this one, which does not exist, would be a name on the Hugging Face Hub."""
    config = load(tmp_path, GOOD.replace("llama-3.1-8b", "./models/target") + "draft: /models/draft\n")
    assert (config.target, config.draft) == (str(tmp_path / "models/target"), "/models/draft")


def test_a_partition_may_have_models_and_limits_of_its_own(tmp_path: Path) -> None:
    own = "{stages: 4, target: big, draft: /models/draft, dtype: bfloat16, max_model_len: 99}"
    config = load(tmp_path, GOOD.replace("{stages: 4}", f"{own}\n  other: {{stages: 2}}"))
    small, other = config.for_partition("small"), config.for_partition("other")
    assert (small.target, small.draft, small.settings.numbers.dtype) == (str(tmp_path / "big"), "/models/draft", "bfloat16")
    assert (small.settings.limits.max_model_len, small.partition) == (99, "small")
    assert (other.target, other.draft, other.settings.numbers.dtype, other.partition) == ("llama-3.1-8b", "none", "auto", "other")


def test_a_passage_is_compared_with_the_groups_of_each_partition(tmp_path: Path) -> None:
    text = "passage: 3\n" + GOOD.replace("stages: 4", "stages: 3")
    assert load(tmp_path, text).partitions["small"].settings.passage == 3
    text = text.replace("stages: 3", "stages: 4")
    assert message(tmp_path, text).startswith("cluster.yaml: partitions.small.passage: rows take 4 timesteps")


def test_a_configuration_survives_the_way_to_another_host(tmp_path: Path) -> None:
    text = GOOD.replace("alpha,", "alpha, ssh: me@10.0.0.1, hostname: n1, interface: eth0, python: /bin/py, environment: {A: b},")
    text = text.replace("partitions:", "  - {host: beta, devices: {cpu: 1}}\npartitions:")
    text += "redis: {host: alpha, port: 7000, password: secret}\nlaunch: {directory: /srv, environment: {NCCL_DEBUG: WARN}}\n"
    config = load(tmp_path, text + "network: {duplex: half, links: [{between: [alpha, beta], latency_us: 9}]}\n")
    assert cluster_from_json(cluster_to_json(config)) == config
    assert config.servers[0].ssh_destination == "me@10.0.0.1"
    with pytest.raises(UserError, match="the configuration of the cluster: unknown key 'newer'"):
        cluster_from_json(cluster_to_json(config).replace('{"target"', '{"newer": 1, "target"', 1))


STAGES = "stages: 4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be a mapping, not empty"),
        ("- a\n", "must be a mapping, not ['a']"),
        (GOOD.replace("target", "taget"), "unknown key 'taget': did you mean target?"),
        ("servers: []\npartitions: {}\n", "servers: must be a list (not empty), not []"),
        ("servers: [{host: a, devices: {}}]\npartitions: {}\n", "partitions: must be a mapping (not empty), not {}"),
        (GOOD.replace("target: llama-3.1-8b", ""), "target: missing"),
        (GOOD + "tree: {widht: 8}\n", "tree: unknown key 'widht': did you mean width?"),
        (GOOD + "tree: {depth: 4}\n", "tree: unknown key 'depth': known: width, children"),
        (GOOD + "tree: {width: 0}\n", "tree.width: must be an integer (1 to 512), not 0"),
        (GOOD + "tree: {width: true}\n", "tree.width: must be an integer (1 to 512), not True"),
        (GOOD + "tree: 8\n", "tree: must be a mapping, not 8"),
        (GOOD + "dtype: int8\n", "dtype: must be one of auto, float32, float64, bfloat16, float16, not 'int8'"),
        (GOOD + "dtype: 32\n", "dtype: must be one of auto, float32, float64, bfloat16, float16, not 32"),
        (GOOD + "draft: ''\n", "draft: must be a string (not empty), not ''"),
        (GOOD + "max_model_len: 0\n", "max_model_len: must be an integer (1 to 10000000), not 0"),
        (GOOD + "max_waiting: -1\n", "max_waiting: must be an integer (0 to 10000000), not -1"),
        (GOOD + "kv_cache_memory: 4gb\n", "kv_cache_memory: must be a number of bytes like 4GiB, 512MB or 1000000, not '4gb'"),
        (GOOD + "kv_cache_memory: 2KB4\n", "kv_cache_memory: must be a number of bytes like 4GiB, 512MB or 1000000, not '2KB4'"),
        (GOOD + "kv_cache_memory: 0\n", "kv_cache_memory: must be a string (not empty) or an integer (at least 1), not 0"),
        (GOOD + "stall_timeout: 0\n", "stall_timeout: must be a number (above 0), not 0"),
        (GOOD.replace(STAGES, ""), "partitions.small.stages: missing"),
        (GOOD + "network: {latency_us: .nan}\n", "network.latency_us: must be a number (0 to 1000000000), not nan"),
        (GOOD + "network: {duplex: both}\n", "network.duplex: must be one of half, full, not 'both'"),
        (GOOD + "network: {links: [{between: [alpha, beta]}]}\n", "network.links[0].between: unknown host 'beta': known: alpha"),
        (GOOD + "network: {links: [{between: [alpha, alpha]}]}\n", "network.links[0].between: alpha twice: name two hosts"),
        (GOOD + "network: {links: [{between: [a, b]}, {between: [b, a]}]}\n",
         "network.links[1]: b and a are listed twice: list each pair once"),
        (GOOD + "network: {links: [{between: [alpha]}]}\n", "network.links[0].between: must be a list of 2, not ['alpha']"),
        (GOOD + "network: {links: [{between: [alpha, beta], bandwidth_gbps: 0}]}\n",
         "network.links[0].bandwidth_gbps: must be a number (above 0, at most 1000000000), not 0"),
        (GOOD + "network: {within_server: pcie5}\n",
         "network.within_server: must be one of 10gbe, 25gbe, pcie4, nvlink, not 'pcie5'"),
        (GOOD + "redis: {host: beta}\n", "redis.host: unknown host 'beta': known: alpha"),
        (GOOD + "redis: {host: alpha, url: 'redis://a:1/0'}\n",
         "redis.url: give url (a server that runs already) or host and port (one to start), not both"),
        (GOOD + "redis: {host: alpha, tls: true}\n",
         "redis.tls: a server that pipedec launch starts has no TLS: give the url of one that has"),
        (GOOD + "redis: {url: http://x}\n",
         "redis.url: must look like redis://host:6379/0, rediss://host:6379/0 or unix:///path"),
        (GOOD + "redis: {url: 'redis://x:port'}\n", "redis.url: not a Redis address: write redis://host:6379/0"),
        (GOOD + "redis: {url: 'redis://a..b:1'}\n", "redis.url: not a Redis address: write redis://host:6379/0"),
        (GOOD + "redis: {url: 'unix:///run/redis', tls: true}\n",
         "redis.tls: a Unix socket has no TLS: remove tls, or use a rediss:// address"),
        (GOOD + "redis: {password: 123456}\n", "redis.password: must be a string, not an integer: quote it"),
        (GOOD + "launch: {environment: {'A B': c}}\n",
         "launch.environment: must be a variable's name of letters, digits and '_', not 'A B'"),
        (GOOD.replace("alpha,", "alpha, ssh: '-oProxyCommand=x',"),
         "servers[0].ssh: must be one destination, like host or user@host: options belong into ~/.ssh/config"),
        (GOOD + "partition: smal\n", "partition: unknown partition 'smal': did you mean small?"),
        (GOOD.replace("rtx3090", "rtx3080"),
         f"servers[0].devices: must be one of {', '.join(DEVICES)}, not 'rtx3080'"),
        (GOOD.replace("rtx3090", "tpu"),
         f"servers[0].devices: must be one of {', '.join(DEVICES)}, not 'tpu'"),
        (GOOD.replace("rtx3090: 4", "rtx3090: 0"), "servers[0].devices.rtx3090: must be an integer (1 to 64), not 0"),
        (GOOD.replace("alpha", "'al pha'"), "servers[0].host: must be a name of letters, digits, '.', '_' and '-', not 'al pha'"),
        (GOOD.replace("partitions:", "  - {host: alpha, devices: {l40: 1}}\npartitions:"),
         "servers: host alpha is listed twice: list each host once"),
        (GOOD.replace("small:", "sm all:"),
         "partitions: must be a name of letters, digits, '.', '_' and '-', not 'sm all'"),
        (GOOD.replace("target: llama-3.1-8b", "target: 2020-01-01"),
         "target: must be a string (not empty), not a date: quote it"),
        (GOOD.replace(STAGES, "stages: many"), "partitions.small.stages: must be an integer (1 to 1024), not 'many'"),
        (GOOD.replace(STAGES, "stages: 4, groups: 5"),
         "partitions.small.groups: 5 groups need at least as many stages, but there are 4"),
        (GOOD.replace(STAGES, "stages: 4, layers: [8, 8]"),
         "partitions.small.layers: 2 entries for 4 stages: give one number per stage, or auto"),
        (GOOD.replace(STAGES, "stages: 4, layers: [8, 8, 0, 16]"),
         "partitions.small.layers[2]: must be an integer (1 to 100000), not 0"),
        (GOOD.replace(STAGES, "stages: 4, layers: even"), "partitions.small.layers: must be auto or a list, not 'even'"),
        (GOOD.replace(STAGES, "stages: 4, servers: [alhpa]"),
         "partitions.small.servers[0]: unknown host 'alhpa': did you mean alpha?"),
        (GOOD.replace(STAGES, "stages: 4, servers: [alpha, alpha]"),
         "partitions.small.servers: a host is listed twice: list each host once"),
        (GOOD.replace(STAGES, "stages: 4, devices: [{host: alpha, device: rtx3090, count: 3}]"),
         "partitions.small.devices: 3 devices for 4 stages: give one device per stage"),
        (GOOD.replace(STAGES, "stages: 4, devices: [{host: alpha, device: rtx3090, count: 4, shared: true}]"),
         "partitions.small.devices[0].shared: only a draft_device may be shared with a stage: leave it out"),
        (GOOD + "spares: [{host: alpha, device: rtx3090, shared: true}]\n",
         "spares[0].shared: only a draft_device may be shared with a stage: leave it out"),
        (GOOD.replace(STAGES, "stages: 4, draft_device: {host: beta, device: l40}"),
         "partitions.small.draft_device.host: unknown host 'beta': known: alpha"),
        (GOOD + "target: again\n", "6: duplicate key 'target'"),
        ("a: &anchor [1]\nb: *anchor\n", "1: anchors and aliases are not allowed"),
        (GOOD + "tree:\n\twidth: 3\n", "7: tab in the indentation: use spaces"),
        (GOOD + "draft: [\n", "7: expected the node content, but found '<stream end>'"),
        ("[" * 5000, "1: nested too deeply"),
        ("1: 2\n", "1: keys must be strings: quote it"),
        ("a: !!python/object/apply:os.getcwd []\n", "1: could not determine a constructor for the tag 'tag:yaml.o..."),
        ("a: 2020-99-99\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "2: but found another document"),
        ("#" * 1_000_001, "larger than 1,000,000 bytes"),
    ],
)  # fmt: skip
@pytest.mark.failure_case("M8")
def test_mistakes_give_one_line(tmp_path: Path, text: str, expected: str) -> None:
    file, _, mistake = message(tmp_path, text).partition(":")
    assert (file, mistake.strip()) == ("cluster.yaml", expected)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such file$"):
        load_cluster(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        load_cluster(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml: not a UTF-8 text file$"):
        load_cluster(binary)


@given(st.text(alphabet="abt:{}[]-&*!|>'\"#%@,? \n\t0.1~<", max_size=60))
@pytest.mark.failure_case("M8")
def test_any_text_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_cluster(file)
    assert "\n" not in str(error.value)


def test_unnamed_partition_among_several(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD + "  big: {stages: 8}\n")
    with pytest.raises(UserError, match=r"^name a partition: small, big"):
        config.find_partition()
    with pytest.raises(UserError, match=r"^unknown partition 'bigg': did you mean big\?$"):
        config.find_partition("bigg")


def test_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD + "redis: {url: 'redis://file:1/0', password: from-file}\n"
    assert load(tmp_path, text).redis == RedisConfig("redis://file:1/0", "from-file")
    monkeypatch.setenv("PIPEDEC_REDIS_PASSWORD", "from-environment")
    monkeypatch.setenv("PIPEDEC_REDIS_URL", "redis://environment:2/0")
    assert load(tmp_path, text).redis == RedisConfig("redis://environment:2/0", "from-environment")
    assert redis_config("redis://flag:3/0") == RedisConfig("redis://flag:3/0", "from-environment")


@pytest.mark.failure_case("M13")
def test_password_never_shows() -> None:
    redis = redis_config("redis://user:s%40cret@host:1/0")
    assert (redis.url, redis.password) == ("redis://user@host:1/0", "s@cret")
    assert redis_config("redis://:secret@host:1/0").url == "redis://host:1/0"
    assert "cret" not in repr(redis)
    for url in ("http://:secret@host", "redis://:secret@host:port", "redis://host?password=secret"):
        with pytest.raises(UserError, match=r"^--redis: ") as error:
            redis_config(url)
        assert "secret" not in str(error.value)


def test_connection_url_holds_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_config().connection_url is None and not redis_config().is_here
    assert redis_config("redis://:own@127.0.0.1:1/0").is_here and not redis_config("redis://:own@host:1/0").is_here
    monkeypatch.setenv("PIPEDEC_REDIS_PASSWORD", "p@ss/:%")
    assert redis_config("redis://user@host:1/0").connection_url == "redis://user:p%40ss%2F%3A%25@host:1/0"
    assert redis_config("redis://:own@host:1/0").connection_url == "redis://:own@host:1/0"
    assert redis_config("unix://:own@/run/redis.sock?db=0").connection_url == "unix://:own@/run/redis.sock?db=0"
    monkeypatch.setenv("PIPEDEC_REDIS_URL", "unix:///run/redis.sock")
    connection = redis_config().connection_url
    assert connection == "unix://:p%40ss%2F%3A%25@/run/redis.sock"
    assert redis_config(connection) == RedisConfig("unix:///run/redis.sock", "p@ss/:%")


def test_tls_and_scheme_agree() -> None:
    assert RedisConfig("redis://host:1/0", tls=True) == RedisConfig("rediss://host:1/0")
    assert not RedisConfig("unix:///run/redis.sock").tls


def test_bad_checkpoint_shape(tmp_path: Path) -> None:
    for text, expected in (
        ("{", "config.json: not valid JSON: download it again"),
        ("[]", "config.json: not a JSON object: download it again"),
        ('{"model_type": "t5"}', "config.json: model_type 't5' is not a causal language model of transformers, which is not"),
        ('{"model_type": "llama"}', "config.json: hidden_size: missing"),
        ('{"model_type": "llama", "hidden_size": -1}', "config.json: hidden_size: must be an integer (1 to 10000000), not -1"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError) as error:
            model_by_name(str(tmp_path))
        assert str(error.value).startswith(f"{tmp_path}/{expected}")
    with pytest.raises(UserError, match=r"^'llama-9' is neither a directory with a config.json nor a known model \(llama-3"):
        model_by_name("llama-9")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"head_dim": 16}),
        ("qwen2", {"attention_bias": False, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ],
)
def test_the_shape_of_a_checkpoint_counts_all_its_parameters(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path, layers=3, **changes)
    shape = model_by_name(str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.num_hidden_layers, shape.tie_word_embeddings) == (3, changes.get("tie_word_embeddings", False))
    projection = model.model.layers[0].self_attn.k_proj
    assert shape.cache_values_per_token == 2 * projection.out_features, "a key and a value"


def test_every_model_type_that_runs_can_be_planned() -> None:
    assert set(FAMILIES) == set(SUPPORTED)


def test_known_shapes_have_their_published_size() -> None:
    for name, billions in {
        "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9,
        "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-32b": 32.762,
        "qwen3.6-27b": 26.9, "gpt-oss-120b": 116.83, "gpt-oss-20b": 20.91, "qwen3-235b-a22b": 235.1, "qwen3-30b-a3b": 30.53,
        "qwen3.6-35b-a3b": 34.66,
    }.items():  # fmt: skip
        assert KNOWN_MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.002), name


def test_compute_takes_over_near_the_roofline() -> None:
    time = pass_time(DEVICES["rtx3090"], HeldWeights(10**9, 4 * 10**9), "float32", 6)
    assert time.ms(64) == time.ms(1) == pytest.approx(4000 / 936 + 0.09)
    assert time.knee_rows == pytest.approx(76, abs=0.1)
    assert time.ms(152) == pytest.approx(2 * (time.ms(1) - 0.09) + 0.09, rel=0.01)


def test_state_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory() == tmp_path / ".cache/pipedec"
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert state_directory() == tmp_path / "run/pipedec"
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(tmp_path / "mine"))
    directory = state_directory()
    assert directory == tmp_path / "mine"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(UserError, match="open to other users"):
        state_directory()
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(ROOT / "cluster.yaml"))
    with pytest.raises(UserError, match="File exists: set PIPEDEC_STATE_DIR"):
        state_directory()


def test_the_slurm_script_parses() -> None:
    subprocess.run(["bash", "-n", ROOT / "launch/slurm.sbatch"], check=True)


def test_a_gpu_is_compared_with_the_plan() -> None:
    for planned, name, gigabytes, difference in (
        ("rtx3090", "NVIDIA GeForce RTX 3090", 25.3, None),
        ("l40", "NVIDIA L40", 47.7, None),
        ("l40s", "NVIDIA L40S", 47.7, None),
        ("l40", "NVIDIA L40S", 47.7, "a NVIDIA L40S, but the plan has a l40 there"),
        ("rtx3090", "NVIDIA GeForce RTX 4090", 25.3, "a NVIDIA GeForce RTX 4090, but the plan has a rtx3090 there"),
        ("a100-40", "NVIDIA A100-PCIE-40GB", 42.3, None),
        ("a100-80", "NVIDIA A100-SXM4-40GB", 42.3, "a NVIDIA A100-SXM4-40GB, but the plan has a a100-80 there"),
        ("a10", "NVIDIA A10G", 23.7, "a NVIDIA A10G, but the plan has a a10 there"),
        ("h100", "NVIDIA H100 MIG 1g.10gb", 10.5, "a NVIDIA H100 MIG 1g.10gb with 10.5 GB, but the plan counts on 80 GB"),
    ):
        assert DEVICES[planned].difference(name, round(gigabytes * 1e9)) == difference


def of_int4(dtype: str) -> HeldWeights:
    return held(ROUNDED["int4"], (62500, 16000), WeightFormat(dtype))


def test_a_kernel_for_quantized_weights_reads_them_again_for_every_64_rows() -> None:
    gpu, cpu = DEVICES["rtx3090"], DEVICES["cpu"]
    time = pass_time(gpu, of_int4("bfloat16"), "bfloat16")
    assert time.reread_ms == time.read_ms == time.weights_ms(64) == pytest.approx(625 / 936)
    assert time.weights_ms(65) == time.weights_ms(128) == pytest.approx(2 * time.read_ms)
    assert time.knee_rows == pytest.approx(time.read_ms / time.row_ms) and time.knee_rows < 64
    assert pass_time(cpu, of_int4("bfloat16"), "bfloat16").reread_ms == 0, "widened in its cache"


def test_a_gpu_is_known_by_the_name_that_its_driver_reports() -> None:
    for reported, name in {
        "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L40S": "l40s", "NVIDIA L40": "l40",
        "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-PCIE-40GB": "a100-40", "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA RTX A6000": "a6000", "NVIDIA A10": "a10", "NVIDIA L4": "l4", "NVIDIA A10G": None,
        "NVIDIA GeForce RTX 5090 Laptop GPU": None, "NVIDIA RTX 6000 Ada Generation": None, "Tesla T4": None, "": None,
    }.items():  # fmt: skip
        device = reported_device(reported)
        assert (device and device.name) == name
