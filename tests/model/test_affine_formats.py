"""Weights that GPTQ, AWQ, AutoRound and compressed-tensors store as integers: read to the bit, kept as they are, used as their
de-quantized twins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny
from support.quantized_files import (
    GROUP,
    QUANTIZATION,
    WRITERS,
    Rounded,
    Tensors,
    natural_groups,
    write_quantized_checkpoint,
)
from support.stage_chain import StageChain
from torch.utils._python_dispatch import TorchDispatchMode

from pipedec.checkpoints.digests import config_digest
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig, model_config
from pipedec.formats import PLAIN, Affine, Format, stated_formats
from pipedec.formats.float8 import Float8
from pipedec.model import weights
from pipedec.model.formats import QuantizedMatrix, base, empty_matrix
from pipedec.model.formats.affine import AffineMatrix
from pipedec.model.weights import Checkpoint

AFFINE = [name for name in QUANTIZATION if name.startswith(("gptq", "awq", "autoround", "ct-int", "ct-w8"))]
SYMMETRIC = ["gptq", "gptq-tagged-v1-but-v2", "gptq-8bit", "gptq-8bit-v2"]
CPU = torch.device("cpu")
GROUPS = (32, 64, 128, 256, 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose matrices have outputs that are all positive or all negative, so that zero points are at the ends."""
    path = tmp_path_factory.mktemp("source")
    model = save_tiny("llama", path, hidden=64, layers=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ".layers." in name:
                weight[::5], weight[1::5] = weight[::5].abs(), -weight[1::5].abs()
    model.save_pretrained(path)
    return path


def written(source: Path, tmp_path: Path, name: str, **options: Any) -> tuple[Path, Tensors]:
    out = tmp_path / "quantized"
    return out, write_quantized_checkpoint(source, out, name, np.random.default_rng(3), dense=tmp_path / "dense", **options)


def format_of(config: ModelConfig, checkpoint: Checkpoint, name: str, dense: Tensors) -> Format:
    return checkpoint.format_of(config, name, tuple(dense[name].shape))


def read(path: Path, dense: Tensors, dtype: torch.dtype = torch.float32) -> dict[str, QuantizedMatrix]:
    """All quantized matrices of a checkpoint, by name."""
    checkpoint, config = Checkpoint(path), model_config(path)
    checkpoint.check_complete(config)
    found = {}
    for name, weight in dense.items():
        format = format_of(config, checkpoint, name, dense) if weight.dim() == 2 else PLAIN
        if format is not PLAIN:
            matrix = empty_matrix(format, *weight.shape, dtype, CPU)
            assert isinstance(matrix, QuantizedMatrix)
            found[name] = matrix
    checkpoint.read_into(found)
    return found


@pytest.mark.parametrize("name", AFFINE)
def test_every_matrix_is_that_of_the_file_to_the_bit(source: Path, tmp_path: Path, name: str) -> None:
    path, dense = written(source, tmp_path, name)
    found = read(path, dense)
    assert len(found) == 2 * 7, "all linear maps of the layers"
    for one, matrix in found.items():
        assert torch.equal(matrix.widened(), dense[one]), one
        rows = torch.tensor([3, 0, 17])
        assert torch.equal(matrix.rows(rows), dense[one][rows])
        assert torch.equal(matrix[8:24].widened(), dense[one][8:24])


@pytest.mark.fast_cases("gptq-ordered-asymmetric", "awq", "ct-int4-asymmetric", "ct-w8a8")
@pytest.mark.parametrize("name", AFFINE)
def test_stages_compute_as_those_of_the_dequantized_checkpoint(source: Path, tmp_path: Path, name: str) -> None:
    path, _ = written(source, tmp_path, name)
    ids = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(2))
    expected = StageChain(tmp_path / "dense", (2,)).prefill(ids, 24)
    for cut in ((2,), (1, 1)):
        found = StageChain(path, cut).prefill(ids, 8)
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
        assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.fast_cases("ct-int4")
@pytest.mark.parametrize("name", ["gptq", "awq", "ct-int4", "ct-w8a8"])
def test_modules_of_transformers_read_them_too(source: Path, tmp_path: Path, name: str) -> None:
    path, _ = written(source, tmp_path, name)
    ids = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(2))
    expected = StageChain(tmp_path / "dense", (2,)).prefill(ids, 24)
    torch.testing.assert_close(StageChain(path, (2,), impl="transformers").prefill(ids, 24), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(24, 80, 32), (40, 96, 96), (16, 72, 16), (8, 256, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["gptq", "awq", "ct-int4", "ct-int8"])
def test_sizes_that_groups_do_not_divide(method: str, symmetric: bool, outputs: int, inputs: int, group: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    weight[::3] = weight[::3].abs()
    options = {} if method == "awq" else {"symmetric": symmetric}
    tensors, dense = WRITERS[method](weight, np.random.default_rng(), group=group, **options)
    matrix = filled(stated(method, group, symmetric), tensors, dense)
    assert torch.equal(matrix.widened(), dense)


@pytest.mark.parametrize("name", ["ct-int4-per-output", "ct-int4-asymmetric"])
def test_words_that_the_numbers_do_not_fill(name: str) -> None:
    weight = torch.randn(44, 84, generator=torch.Generator().manual_seed(1))
    weight[::3] = weight[::3].abs()
    tensors, dense = WRITERS[name](weight, np.random.default_rng(), group=0)
    assert tensors["weight_packed"].shape == (44, 11)
    matrix = filled(stated("ct-int4", 84, "asymmetric" not in name), tensors, dense)
    assert torch.equal(matrix.widened(), dense)


def stated(method: str, group: int, symmetric: bool) -> Affine:
    document = json.loads(json.dumps(QUANTIZATION[method]))
    if "config_groups" in document:
        document["config_groups"]["group_0"]["weights"] |= {"group_size": group, "symmetric": symmetric}
    else:
        document |= {"group_size": group, "sym": symmetric}
    format = stated_formats(document).stated("model.layers.0.mlp.up_proj.weight")
    assert isinstance(format, Affine)
    return format


def filled(format: Affine, tensors: Tensors, dense: torch.Tensor, dtype: torch.dtype = torch.float32) -> AffineMatrix:
    types = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    format = format.resolved({format.scales.suffix: types[tensors[format.scales.suffix].dtype]})
    matrix = AffineMatrix.empty(format, *dense.shape, dtype, CPU)
    matrix.fill({suffix: tensor for suffix, tensor in tensors.items() if suffix in format.tensors(tuple(dense.shape))})
    return matrix


@pytest.mark.parametrize(
    ("strategy", "bits", "packed", "symmetric"),
    [
        (strategy, bits, packed, symmetric)
        for strategy in ("group", "channel", "tensor")
        for bits, packed in ((4, True), (8, True), (8, False))
        for symmetric in (True, False)
        if symmetric or not packed or strategy != "tensor"  # those zero points are not packed
    ],
)
def test_compressed_tensors_are_what_their_package_makes_of_them(
    tmp_path: Path, bits: int, packed: bool, symmetric: bool, strategy: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    outputs, inputs = 44, 64
    arguments = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=GROUP if strategy == "group" else None
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(4))
    weight[::3] = weight[::3].abs()
    rounded = Rounded(
        weight, natural_groups(inputs, GROUP if strategy == "group" else 0), bits, symmetric, torch.float32, strategy == "tensor"
    )
    single, middle = strategy == "tensor", 2 ** (bits - 1)
    state = {"weight": weight, "weight_scale": rounded.scales[0, :1].clone() if single else rounded.scales}
    zeros = torch.from_numpy(rounded.zeros - middle).to(torch.int8)
    state["weight_zero_point"] = zeros[0, :1].clone() if single else zeros
    compressor = PackedQuantizationCompressor if packed else IntQuantizationCompressor
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    kind = "pack-quantized" if packed else "int-quantized"
    document = {
        "quant_method": "compressed-tensors", "format": kind,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    format = stated_formats(document).stated("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(format, Affine)
    assert torch.equal(filled(format, stored, expected).widened(), expected)


def test_awq_is_what_the_package_of_compressed_tensors_makes_of_it() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(5)
    any_word = (torch.randint(-(2**31), 2**31, shape, generator=generator).int() for shape in ((64, 5), (2, 5)))
    tensors = dict(zip(("qweight", "qzeros"), any_word, strict=True)) | {"scales": torch.rand(2, 40, generator=generator)}
    stored = AutoAWQConverter(group_size=32).process({f"x.{suffix}": tensor for suffix, tensor in tensors.items()})
    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    state = {name.removeprefix("x."): tensor for name, tensor in stored.items()}
    expected = PackedQuantizationCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]
    assert torch.equal(filled(stated("awq", 32, False), tensors, expected).widened(), expected)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_zero_points_of_symmetric_weights_are_not_kept(source: Path, tmp_path: Path, name: str) -> None:
    path, dense = written(source, tmp_path, name)
    for matrix in read(path, dense).values():
        assert set(matrix.held) == {"codes", "scales"}


def test_orders_of_the_inputs_may_differ_among_fused_matrices(source: Path, tmp_path: Path) -> None:
    path, dense = written(source, tmp_path, "gptq-ordered")
    tensors = load_file(path / "model.safetensors")
    layer = "model.layers.0.self_attn."
    assert not torch.equal(tensors[layer + "q_proj.g_idx"], tensors[layer + "k_proj.g_idx"])
    found = read(path, dense)
    assert "groups" in found[layer + "q_proj.weight"].held
    assert not found[layer + "q_proj.weight"].format.is_fusable


def test_an_order_that_is_none_is_dropped(source: Path, tmp_path: Path) -> None:
    path, dense = written(source, tmp_path, "gptq", quantization={"desc_act": True})
    for name, matrix in read(path, dense).items():
        assert "groups" not in matrix.prepared().held
        assert torch.equal(matrix.widened(), dense[name])


@pytest.mark.fast_cases("gptq-others")
@pytest.mark.parametrize(
    ("name", "others", "quantization", "plain"),
    [
        pytest.param(
            "gptq", {"mlp": "gptq-8bit", "k_proj": None, "v_proj": "gptq-v2-asymmetric"},
            {"dynamic": {
                r"+:.*\.mlp\..*": {"bits": 8}, r"-:.*k_proj": {},
                r".*\.v_proj": {"sym": False},
            }, "checkpoint_format": "gptq_v2"},
            "k_proj", id="gptq-others",
        ),
        pytest.param("gptq", {"o_proj": None}, {"modules_in_block_to_quantize": [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"], ["mlp.gate_proj"], ["mlp.down_proj"],
        ]}, "o_proj", id="gptq-chosen"),
        pytest.param("awq", {"layers.0": None}, {"modules_to_not_convert": ["layers.0."]}, "layers.0.mlp.up_proj", id="awq"),
        pytest.param(
            "autoround", {"down_proj": "gptq-8bit", "q_proj": None},
            {"extra_config": {
                **{f"model.layers.{layer}.self_attn.q_proj": {"bits": 16, "data_type": "float"} for layer in range(2)},
                ".*down_proj.*": {"bits": 8},
            }},
            "q_proj", id="autoround",
        ),
        pytest.param(
            "ct-int4", {"v_proj": None, "mlp": "ct-w8a8", "o_proj": "ct-int8-asymmetric"},
            {"format": "mixed-precision", "ignore": ["lm_head", "re:.*v_proj"], "config_groups": {
                "group_0": {**QUANTIZATION["ct-int4"]["config_groups"]["group_0"], "format": "pack-quantized"},
                "group_1": {**QUANTIZATION["ct-w8a8"]["config_groups"]["group_0"], "format": "int-quantized",
                            "targets": [r"re:.*\.mlp\..*"]},
                "group_2": {**QUANTIZATION["ct-int8-asymmetric"]["config_groups"]["group_0"], "format": "pack-quantized",
                            "targets": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]},
            }},
            "v_proj", id="compressed-tensors",
        ),
    ],
)  # fmt: skip
def test_modules_of_a_checkpoint_may_have_formats_of_their_own(
    source: Path, tmp_path: Path, name: str, others: dict[str, str | None], quantization: dict[str, Any], plain: str
) -> None:
    path, dense = written(source, tmp_path, name, others=others, quantization=quantization)
    found = read(path, dense)
    assert found and not any(plain in one for one in found)
    for one, matrix in found.items():
        assert torch.equal(matrix.widened(), dense[one]), one
    config = model_config(path)
    stated_plain = next(one for one in dense if plain in one)
    assert config.formats.of(stated_plain, tuple(dense[stated_plain].shape)) is PLAIN, "without the files"
    ids = torch.arange(20)
    expected = StageChain(tmp_path / "dense", (2,)).prefill(ids, 20)
    torch.testing.assert_close(StageChain(path, (1, 1)).prefill(ids, 20), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "ct-int4"])
def test_a_quantized_head(source: Path, tmp_path: Path, name: str) -> None:
    change = {"lm_head": True} if name == "gptq" else {"ignore": []}
    path, dense = written(source, tmp_path, name, others={"lm_head": name}, quantization=change)
    found = read(path, dense)
    assert torch.equal(found["lm_head.weight"].widened(), dense["lm_head.weight"])
    ids = torch.arange(20)
    expected = StageChain(tmp_path / "dense", (2,)).prefill(ids, 20)
    torch.testing.assert_close(StageChain(path, (2,)).prefill(ids, 20), expected, atol=3e-5, rtol=1e-5)


def test_a_matrix_that_is_there_as_it_is_counts_as_plain(source: Path, tmp_path: Path) -> None:
    path, dense = written(source, tmp_path, "awq", others={"q_proj": None})
    found = read(path, dense)
    assert not any("q_proj" in name for name in found) and len(found) == 2 * 6


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq-asymmetric"), ("quant_config.json", "awq")])
def test_old_checkpoints_have_their_description_in_a_file_of_its_own(source: Path, tmp_path: Path, file: str, name: str) -> None:
    path, dense = written(source, tmp_path, name)
    config = json.loads((path / "config.json").read_text())
    described = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    without = config_digest(path)
    del described["quant_method"]
    if name == "awq":
        described = {"w_bit": 4, "q_group_size": described["group_size"], "version": "GEMM", "zero_point": True}
    (path / file).write_text(json.dumps(described))
    assert config_digest(path) != without
    for one, matrix in read(path, dense).items():
        assert torch.equal(matrix.widened(), dense[one])
    (path / file).write_text(json.dumps({**described, "bits": 3, "w_bit": 3}))
    with pytest.raises(UserError, match=rf"{file}: quantization_config: bits 3 is not supported, only 4( or 8)?$"):
        model_config(path)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("gptq", "GPTQ, 4 bits in groups of 32"), ("gptq-per-output", "GPTQ, 4 bits"),
        ("gptq-8bit", "GPTQ, 8 bits in groups of 32"),
        ("awq", "AWQ, 4 bits in groups of 32"), ("autoround-awq", "AutoRound, 4 bits in groups of 32"),
        ("ct-w8-single", "compressed-tensors, 8 bits"),
    ],
)  # fmt: skip
def test_titles(name: str, title: str) -> None:
    assert stated_formats(QUANTIZATION[name]).title == title


def test_activations_are_kept_in_full_precision_and_users_learn_it() -> None:
    sentence = "Activations are kept in full precision, though the checkpoint was made for quantized ones."
    assert stated_formats(QUANTIZATION["ct-w8a8"]).notes == (sentence,)
    assert stated_formats({**QUANTIZATION["autoround"], "act_bits": 8}).notes == (sentence,)
    assert stated_formats(QUANTIZATION["ct-int4"]).notes == ()


def changed(name: str, **weights: Any) -> dict[str, Any]:
    document = json.loads(json.dumps(QUANTIZATION[name]))
    document["config_groups"]["group_0"]["weights"] |= weights
    return dict(document)


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "tensor"}, (0, 0)), ({"strategy": "channel"}, (1, 0)), ({"strategy": None}, (0, 0)),
        ({"strategy": "block", "block_structure": [128, 64]}, (128, 64)), ({"strategy": "group", "group_size": 32}, (1, 32)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["float-quantized", "naive-quantized"])
def test_schemes_of_floating_point_numbers(kind: str, weights: dict[str, Any], block: tuple[int, int]) -> None:
    document = changed("ct-w8-single", type="float", group_size=None) | {"format": kind}
    document["config_groups"]["group_0"]["weights"] |= weights
    found = stated_formats(document).stated("model.layers.0.mlp.up_proj.weight")
    assert found == Float8(scale="weight_scale", block=block)


@pytest.mark.parametrize("name", AFFINE)
def test_only_linear_maps_of_layers_are_quantized(name: str) -> None:
    formats = stated_formats(QUANTIZATION[name])
    for plain in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert formats.of(plain, (64, 64)) is PLAIN
    assert formats.of("model.layers.0.input_layernorm.weight", (64,)) is PLAIN
    assert isinstance(formats.of("model.layers.0.mlp.up_proj.weight", (64, 64)), Affine)


def test_old_checkpoints_name_it_compression_config(source: Path, tmp_path: Path) -> None:
    path, dense = written(source, tmp_path, "ct-int4")
    config = json.loads((path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    assert len(read(path, dense)) == 2 * 7


REFUSED = [
    ({**QUANTIZATION["gptq"], "bits": 3}, "bits 3 is not supported, only 4 or 8"),
    ({**QUANTIZATION["gptq"], "bits": 2}, "bits 2 is not supported, only 4 or 8"),
    ({**QUANTIZATION["gptq"], "bits": "4"}, "bits 4 is not supported, only 4 or 8"),
    ({**QUANTIZATION["gptq"], "group_size": 0}, "group_size must be -1 or a positive number, not 0"),
    ({**QUANTIZATION["gptq"], "group_size": True}, "group_size must be -1 or a positive number, not True"),
    ({**QUANTIZATION["gptq"], "checkpoint_format": "marlin"}, "version marlin is not supported, only gptq or gptq_v2"),
    ({**QUANTIZATION["gptq"], "is_marlin_format": True}, "version marlin is not supported, only gptq or gptq_v2"),
    ({**QUANTIZATION["gptq"], "dynamic": {"+:.*mlp": {"bits": 2}}}, "bits 2 is not supported, only 4 or 8"),
    ({**QUANTIZATION["gptq"], "dynamic": {"+:(": {}}}, "( is not a regular expression: missing ), unterminated subpattern at"),
    ({**QUANTIZATION["gptq"], "dynamic": ["x"]}, "dynamic must be a mapping of names to mappings"),
    ({**QUANTIZATION["awq"], "version": "gemv_fast"}, "version gemv_fast is not supported, only gemm"),
    ({**QUANTIZATION["awq"], "version": "exllama"}, "version exllama is not supported, only gemm"),
    ({**QUANTIZATION["awq"], "backend": "llm-awq"}, "version llm-awq is not supported, only gemm"),
    ({"quant_method": "gptq"}, "bits None is not supported, only 4 or 8"),
    ({**QUANTIZATION["awq"], "bits": 8}, "bits 8 is not supported, only 4"),
    ({**QUANTIZATION["awq"], "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of strings"),
    ({**QUANTIZATION["autoround"], "bits": 2}, "bits 2 is not supported, only 4 or 8 or 16"),
    ({**QUANTIZATION["autoround"], "data_type": "mx_fp"}, "data_type mx_fp is not supported, only int"),
    ({**QUANTIZATION["autoround"], "packing_format": "auto_round:llm_compressor"}, "packing_format auto_round:llm_compressor"),
    ({**QUANTIZATION["ct-int4"], "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported: choose a"),
    ({**QUANTIZATION["ct-int4"], "transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported: choose"),
    (
        {**QUANTIZATION["ct-int4"], "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config sparse-24-bitmask is not supported: choose a dense checkpoint",
    ),
    ({**QUANTIZATION["ct-int4"], "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized is not supported, only"),
    ({**QUANTIZATION["ct-int4"], "format": "mxfp4-pack-quantized"}, "format mxfp4-pack-quantized is not supported, only"),
    ({**QUANTIZATION["ct-int4"], "format": "marlin-24"}, "format marlin-24 is not supported, only"),
    ({**QUANTIZATION["ct-int4"], "config_groups": {}}, "config_groups names no weights"),
    ({**QUANTIZATION["ct-int4"], "config_groups": {"W4A16": ["Linear"]}}, "config_groups must be a mapping of names to mappings"),
    ({**QUANTIZATION["ct-int4"], "ignore": ["re:["]}, "[ is not a regular expression: unterminated character set at position 0"),
    (changed("ct-int4", num_bits=3), "num_bits 3 is not supported, only 4 or 8"),
    (changed("ct-int4", type="float"), "format pack-quantized is not supported, only float-quantized or naive-quantized"),
    (changed("ct-int4", strategy="tensor_group"), "strategy tensor_group is not supported, only tensor or channel or group"),
    (changed("ct-w8a8", num_bits=4), "num_bits 4 is not supported, only 8"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "words"), REFUSED)
def test_other_descriptions_are_refused_in_a_line(source: Path, tmp_path: Path, document: dict[str, Any], words: str) -> None:
    path = tmp_path / "refused"
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": document}))
    with pytest.raises(UserError) as caught:
        model_config(path)
    assert str(caught.value).startswith(f"{path / 'config.json'}: quantization_config: {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "words"),
    [
        ("gptq", "qweight", lambda one: one[1:], "has shape [7, 64], but config.json asks for [8, 64]"),
        ("gptq", "scales", lambda one: one.double(), "has dtype F64; not F16 or BF16 or F32"),
        ("gptq", "qzeros", lambda one: one + 1, "qzeros is not that of symmetric weights, as quantization_config has it (sym)"),
        ("gptq", "g_idx", lambda one: one.flip(0), "g_idx orders the inputs, though the quantization_config does not (desc_act)"),
        ("gptq-ordered", "g_idx", lambda one: one + 1, "g_idx names groups that are not there"),
        ("gptq-ordered", "g_idx", lambda one: one.float(), "has dtype F32; not I32 or I64"),
        ("awq", "qweight", lambda one: one.T.contiguous(), "has shape [8, 64], but config.json asks for [64, 8]"),
        ("ct-w8a8", "weight", lambda one: one.float(), "has dtype F32; not I8"),
        ("ct-int4", "weight_scale", lambda one: one[:, :1].clone(), "has shape [64, 1], but config.json asks for [64, 2]"),
    ],
)
def test_tensors_that_do_not_suit_are_refused_by_name(
    source: Path, tmp_path: Path, name: str, suffix: str, change: Any, words: str
) -> None:
    path, dense = written(source, tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    one = f"model.layers.0.self_attn.q_proj.{suffix}"
    tensors[one] = change(tensors[one])
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        read(path, dense)
    assert str(caught.value).startswith(f"{path / 'model.safetensors'}: tensor model.layers.0.self_attn.q_proj.")
    assert str(caught.value).endswith(words)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("gptq", (64, 36), "GPTQ takes matrices whose inputs are a multiple of 8, not 36"),
        ("gptq-asymmetric", (36, 64), "GPTQ takes matrices whose outputs are a multiple of 8, not 36"),
        ("awq", (36, 64), "AWQ takes matrices whose outputs are a multiple of 8, not 36"),
        ("ct-int4", (64, 33), "compressed-tensors takes matrices whose inputs are even, not 33"),
    ],
)
def test_sizes_that_do_not_suit_are_refused(name: str, shape: tuple[int, int], words: str) -> None:
    format = stated_formats(QUANTIZATION[name]).stated("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UserError, match=f"^{words}$"):
        empty_matrix(format, *shape, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", AFFINE)
def test_matrices_take_the_bytes_that_their_formats_count(source: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path, dense = written(source, tmp_path, name)
    for one, matrix in read(path, dense, dtype).items():
        held = sum(tensor.nbytes for tensor in matrix.prepared().tensors())
        assert held == pytest.approx(matrix.format.held_bytes(tuple(dense[one].shape), dtype.itemsize), rel=0.03)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *((name, group) for name in ("gptq", "gptq-asymmetric", "gptq-ordered", "awq", "ct-int4", "ct-int8") for group in GROUPS),
        ("ct-w8a8", 0), ("ct-w8-single", 0),
    ],
)  # fmt: skip
def test_products_in_bfloat16_are_those_with_the_weights(name: str, group: int) -> None:
    """Torch's kernels, too, where there are any."""
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(1))
    options = {} if name.startswith("ct-w8") else {"group": group}
    tensors, dense = WRITERS[name](weight, np.random.default_rng(1), **options)
    usual = stated_formats(QUANTIZATION[name]).stated("model.layers.0.mlp.up_proj.weight")
    assert isinstance(usual, Affine)
    format = replace(usual, group=group, is_ordered=usual.is_ordered and group > 0)
    matrix = filled(format, tensors, dense, torch.bfloat16)
    rows = torch.randn(5, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = rows.float() @ dense.T
    tolerance = 0.02 * float(expected.abs().max())
    kept = matrix.prepared(keeps_rows=True)
    assert torch.equal(kept.widened(), dense)
    torch.testing.assert_close(kept.linear(rows).float(), expected, atol=tolerance, rtol=0)
    scales = matrix.held["scales"]
    torch.testing.assert_close(matrix.prepared().linear(rows).float(), expected, atol=tolerance, rtol=0)
    has_kernel = not format.is_ordered and (group > 0 if format.bits == 4 else group == 0 or name.startswith("ct-w8"))
    assert (matrix.held["scales"] is not scales) == has_kernel


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that was made, without views."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and all(result is not one for one in args):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("name", ["gptq-asymmetric", "gptq-ordered", "awq", "ct-int4-asymmetric", "ct-w8a8", "ct-w8-single"])
def test_a_large_matrix_is_unpacked_in_small_parts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Parts of the file begin within it, and the parts that are unpacked within those."""
    monkeypatch.setattr(weights, "CHUNK_VALUES", 256 * 64)
    monkeypatch.setitem(base.LOADED_VALUES, "cpu", 64 * 64)
    save_tiny("llama", tmp_path / "large", hidden=64, layers=1, intermediate_size=1000)
    path, dense = written(tmp_path / "large", tmp_path, name, others={r"down_proj|self_attn": None})
    found = read(path, dense)
    assert len(found) == 2
    for one, matrix in found.items():
        assert torch.equal(matrix.widened(), dense[one]), one
    stored, prefix = load_file(path / "model.safetensors"), one.removesuffix("weight")
    tensors = {suffix: stored[prefix + suffix] for suffix in matrix.format.tensors((1000, 64))}
    with LargestTensor() as counted:
        matrix.fill(tensors)
    assert 64 * 64 <= counted.largest <= 2 * 64 * 64


def test_a_bias_that_some_programs_add_must_be_zero(source: Path, tmp_path: Path) -> None:
    path, dense = written(source, tmp_path, "gptq")
    tensors, one = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.bias"
    save_file({**tensors, one: torch.zeros(128).half()}, path / "model.safetensors")
    read(path, dense)
    save_file({**tensors, one: torch.ones(128).half()}, path / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor {one} is not 0, though this model has no such bias by its config.json$"):
        read(path, dense)
