"""What is registered, what is refused and how, and the self-check; no engine is started."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import envs
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from residualquant import cli
from residualquant.cache import LayerRotations
from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.layout import PageLayout
from residualquant.models.base import KVShape
from residualquant.models.loading import load_model, model_folder
from residualquant.pages import read_pages
from residualquant.residual import decode
from residualquant.rotation.calibration import calibrate
from residualquant.vllm import register
from residualquant.vllm import settings as vllm_settings
from residualquant.vllm.attention import OP_NAME
from residualquant.vllm.backend import LoopedKVManager, LoopedKVSpec
from residualquant.vllm.decode import iter_decode
from residualquant.vllm.paged import PackedPages, StepBatch
from residualquant.vllm.settings import Settings, check_config, kv_shape, layer_rotations
from residualquant.vllm.startup import TOLERANCE, check_paged, set_num_threads

PACKED = {"preset": "INT2/4 g=32", "rotation": "hadamard"}
SHAPE = KVShape(4, 2, 2, 64)


def engine_config(model, settings=None, **options):
    extra = {} if settings is None else {"residualquant": settings}
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
    return EngineArgs(str(model), additional_config=extra, **(defaults | options)).create_engine_config()


# ------------------------------------------------------------------------------------------------- registration


def test_registering_twice_changes_nothing():
    register()
    before = len(CompilationConfig._attention_ops), vllm.config.VllmConfig.try_verify_and_update_config
    register()
    assert (len(CompilationConfig._attention_ops), vllm.config.VllmConfig.try_verify_and_update_config) == before
    assert CompilationConfig._attention_ops.count(OP_NAME) == 1


def test_another_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.26.0")
    with pytest.raises(ResidualQuantError, match=r"needs vLLM 0\.25\.1, got 0\.26\.0"):
        register()


def test_a_local_build_of_the_right_version_is_taken(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.25.1+cpu")
    register()


# ----------------------------------------------------------------------------------------------------- settings


def test_off_is_the_default():
    assert Settings.read(None, SHAPE).config.is_off


def test_settings_take_a_label_or_the_fields_of_a_configuration():
    assert Settings.read({**PACKED, "loops": 2}, SHAPE).config.bits == (2, 4)
    by_label = Settings.read({**PACKED, "group_size": 16}, SHAPE)
    assert by_label.config == preset("INT2/4 g=16", rotation="hadamard")
    assert Settings.read(json.loads(json.dumps(by_label.config.to_dict())), SHAPE) == by_label


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"preset": "INT5"}, "unknown preset 'INT5'"),
        ({"presets": "INT2/4 g=32"}, "unknown name in a KV configuration: presets"),
        ({"bits": [2, 2, 4]}, "do not divide into groups of 3"),
        ({**PACKED, "recent_tokens": 64}, "no BF16 windows, got sink_tokens=0 and recent_tokens=64"),
        ({**PACKED, "layer_bits": [[0, [4, 4, 4, 4]]]}, "pages of all layers have one size, got layer_bits="),
        ({**PACKED, "rotation": "optr_h"}, 'rotation="optr_h" needs the folder of its "rotations", got None'),
        ({**PACKED, "rotations": "somewhere"}, 'rotation="hadamard" takes no "rotations"'),
        ("INT2/4 g=32", "must be an object"),
        ({}, 'must name a "preset" such as "INT2/4 g=32", or "bits", got {}'),
        ({"preset": None}, "must name a \"preset\" .* got {'preset': None}"),
        ({"preset": ["INT2/4 g=32"]}, r"preset must be a str, got \['INT2/4 g=32'\]"),
        ({**PACKED, "label": "x"}, "unknown name in a KV configuration: label"),
        ({1: 2}, "unknown name in a KV configuration: 1"),
        ({**PACKED, "loops": 2, "bits": [2, 2, 2, 4]}, r"got loops=2 and bits=\(2, 2, 2, 4\)"),
        ({**PACKED, "loops": True}, "loops must be an integer, got True"),
        ({**PACKED, "loops": 10**9}, "loops must be at most 4, got 1000000000"),
        ({"preset": "BF16", "bits": [2, 2, 2, 4]}, r'preset "BF16" keeps K and V as they are, got bits=\(2, 2, 2, 4\)'),
        ({**PACKED, "int2_clip": "0.9"}, "int2_clip must be a number, got '0.9'"),
        ({**PACKED, "int2_clip": None}, "int2_clip must be a number, got None"),
        ({**PACKED, "rotation": "optr_h", "rotations": 5}, "rotations must be a str, got 5"),
        ({**PACKED, "rotation": "optr_h", "rotations": ["/x"]}, r"rotations must be a str, got \['/x'\]"),
    ],
)
def test_settings_that_cannot_be_served_name_the_value(tiny_ouro, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Settings.read(settings, SHAPE)
    with pytest.raises(ResidualQuantError, match=sentence):
        engine_config(tiny_ouro, settings)


@pytest.mark.parametrize("extra", [PACKED, {"residual_quant": PACKED}, {"ResidualQuant": PACKED}])
def test_settings_that_miss_their_place_are_refused(tiny_ouro, extra):
    with pytest.raises(ResidualQuantError, match=r'given as {"residualquant": .*, got the name'):
        EngineArgs(str(tiny_ouro), additional_config=extra, max_model_len=256).create_engine_config()
    options = {"additional_config": {"of_another": 1}, "max_model_len": 256, "skip_tokenizer_init": True}
    EngineArgs(str(tiny_ouro), **options).create_engine_config()


def test_groups_that_do_not_divide_a_head_are_refused():
    with pytest.raises(ValueError, match="head_dim 96 is not divisible by the group size 64 of loop 0"):
        Settings.read({**PACKED, "group_size": 64}, KVShape(32, 4, 2, 96))


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def odd(tiny_ouro, tmp_path):
    """A function that writes the tiny model's config.json with changes, and gives its folder."""

    def write(**changes):
        values = json.loads((tiny_ouro / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value != "left out"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"total_ut_steps": "4"}, "total_ut_steps must be a positive integer, got '4'"),
        ({"total_ut_steps": 0}, "total_ut_steps must be a positive integer, got 0"),
        ({"total_ut_steps": 10**9}, "total_ut_steps must be at most 1024, got 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"num_key_value_heads": "left out"}, "multiple of num_key_value_heads, got 4 and 16"),
        ({"head_dim": "64"}, "head_dim must be a positive integer, got '64'"),
        ({"model_type": "huginn_raven"}, "is RavenForCausalLM's, got the architecture OuroForCausalLM"),
    ],
)
@pytest.mark.parametrize("settings", [None, PACKED])
def test_an_odd_checkpoint_is_refused_in_one_sentence(odd, settings, changes, sentence):
    with pytest.raises(ResidualQuantError, match=f"cannot be used: .*{sentence}") as caught:
        engine_config(odd(**changes), settings)
    assert "\n" not in str(caught.value)


def test_overrides_of_a_checkpoint_are_checked_too(tiny_ouro):
    with pytest.raises(ResidualQuantError, match="total_ut_steps must be a positive integer, got 0"):
        engine_config(tiny_ouro, PACKED, hf_overrides={"total_ut_steps": 0})


def test_what_a_checkpoint_leaves_out_has_its_default(odd):
    config = engine_config(odd(num_hidden_layers="left out", total_ut_steps=None, head_dim="left out"), PACKED)
    assert kv_shape(config.model_config.hf_config) == KVShape(4, 24, 2, 64)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "at least one prompt and one configuration are needed, got 0 and 1"),
        ([[1] * 250], {}, "exceed the model's 256 positions"),
        ([[1, 320]], {}, "prompt 0 holds token 320"),
        ([[1]], {"max_rows": -1}, "max_rows must be at least 1, got -1"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused_before_an_engine_starts(tiny_ouro, prompts, options, sentence):
    model = load_model(tiny_ouro, "cpu")
    with pytest.raises(ValueError, match=sentence):
        next(iter_decode(model, prompts, [preset("INT2/4 g=32")], 8, {0}, **options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline parallelism"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connectors"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be \"auto\", got 'fp8'"),
        ({"block_size": 8}, "block_size that is a multiple of 16, got 8"),
    ],
)
def test_what_the_cache_cannot_do_is_refused_in_one_sentence(tiny_ouro, options, sentence):
    with pytest.raises(ResidualQuantError, match=sentence) as caught:
        engine_config(tiny_ouro, PACKED, **options)
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_divide_are_refused(tiny_ouro):
    with pytest.raises(ResidualQuantError, match="divides the 2 KV heads, got 4"):
        engine_config(tiny_ouro, PACKED, tensor_parallel_size=4, distributed_executor_backend="mp")


def test_the_second_model_runner_is_refused(tiny_ouro, monkeypatch):
    envs.disable_envs_cache()  # an engine of another test may have read the environment for good
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ResidualQuantError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        engine_config(tiny_ouro)


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({"bits": [3, 3, 3, 3]}, {}, r"the GPU kernels need bits 0, 1, 2, 4, 8, got \(3, 3, 3, 3\)"),
        ({**PACKED, "rotation": "none", "rounding": "bf16"}, {}, 'the GPU kernels need rounding "fp32"'),
        (PACKED, {"dtype": "float16"}, "the GPU kernels read BF16, got dtype float16"),
    ],
)
def test_what_no_kernel_reads_is_refused_where_there_is_a_gpu(tiny_ouro, settings, options, sentence, monkeypatch):
    with monkeypatch.context() as patch:  # else a machine with a GPU refuses it here
        patch.setattr(vllm_settings, "_check_kernels", lambda *_: None)
        config = engine_config(tiny_ouro, settings, **options)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    with pytest.raises(ResidualQuantError, match=sentence):
        check_config(config)


@pytest.fixture
def plain_llama(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_that_is_not_looped_is_refused(plain_llama, capsys):
    config = SimpleNamespace(
        additional_config={"residualquant": PACKED}, model_config=SimpleNamespace(architecture="LlamaForCausalLM")
    )
    with pytest.raises(ResidualQuantError, match=r"serves looped models .* got LlamaForCausalLM"):
        check_config(config)
    check_config(SimpleNamespace(**vars(config) | {"additional_config": {}}))  # left alone when nothing was asked
    with pytest.raises(SystemExit):
        cli.main(["serve", str(plain_llama), "--only-print"])
    assert "got LlamaForCausalLM" in capsys.readouterr().err
    with pytest.raises(Exception, match=r"serves looped models .* got LlamaForCausalLM"):
        engine_config(plain_llama, PACKED)


def test_both_families_are_served(capsys):
    for model in ("mini-ouro-code", "mini-huginn"):
        cli.main(["serve", model, "--only-print"])
        assert f"--served-model-name {model}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def rotations(tiny_ouro, tmp_path_factory):
    """A calibration of the tiny model."""
    folder = tmp_path_factory.mktemp("rotations")
    config = preset("INT2/4 g=32", rotation="oscar")
    calibrate(load_model(tiny_ouro), {folder: config}, [[1, 2, 3, 4] * 8], [[5, 6, 7] * 8], progress=False)
    return folder


def test_rotations_of_another_model_are_refused(rotations):
    settings = {"preset": "INT2/4 g=32", "rotation": "oscar", "rotations": str(rotations)}
    with pytest.raises(ResidualQuantError, match=r"was calibrated for .*, not for .*mini-ouro-maths"):
        engine_config(model_folder("mini-ouro-maths"), settings)


def test_the_check_of_rotations_leaves_no_threads_to_a_fork(tiny_ouro, rotations, monkeypatch):
    threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(vllm_settings, "layer_rotations", lambda *_: seen.append(torch.get_num_threads()))
    set_num_threads(3)
    try:
        engine_config(tiny_ouro, {"preset": "INT2/4 g=32", "rotation": "oscar", "rotations": str(rotations)})
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        set_num_threads(threads)


def test_every_process_gets_the_rotations_of_its_heads(tiny_ouro, rotations):
    settings = {"preset": "INT2/4 g=32", "rotation": "oscar", "rotations": str(rotations)}
    config = engine_config(tiny_ouro, settings)
    whole, second = (layer_rotations(config, slice(first, 2), torch.device("cpu")) for first in (0, 1))
    for layer in range(kv_shape(config.model_config.hf_config).layers):
        assert torch.equal(second.get(0, layer, "k").matrix, whole.get(0, layer, "k").matrix[1:])


# ------------------------------------------------------------------------------------------- pages and commits


def test_a_page_takes_what_the_arithmetic_says():
    layout = PageLayout(preset("INT2/4 g=32"), 128, 16)
    spec = LoopedKVSpec(block_size=16, num_kv_heads=16, head_size=layout.page_bytes_per_head // 16, dtype=torch.uint8)
    assert spec.page_size_bytes == spec.real_page_size_bytes == 16 * layout.page_bytes_per_head
    assert spec.page_size_bytes == 16 * 16 * 2 * 198  # tokens, heads, K and V, App. A.3's bytes for four loops
    assert LoopedKVSpec.merge([spec, replace(spec)]) == spec
    assert KVCacheSpecRegistry.get_manager_class(spec) is LoopedKVManager


def test_a_block_is_shared_only_after_its_step(monkeypatch):
    committed = []
    base = LoopedKVManager.__mro__[1]
    monkeypatch.setattr(base, "cache_blocks", lambda self, request, tokens: committed.append(tokens))
    monkeypatch.setattr(base, "pop_blocks_for_free", lambda self, request_id: [])
    manager = object.__new__(LoopedKVManager)
    manager._uncommitted = {}
    request = SimpleNamespace(request_id="a", num_computed_tokens=0)
    manager.cache_blocks(request, 32)  # scheduled
    request.num_computed_tokens = 32  # run
    manager.pop_blocks_for_free("a")
    manager.pop_blocks_for_free("a")
    assert committed == [0, 32]


# --------------------------------------------------------------------------------------------------- self-check


class WrongLoop(PackedPages):
    """Reads another loop than it is asked for."""

    def past(self, pages, slots, loop):
        return super().past(pages, slots, (loop + 1) % self.layout.config.loops)


class Forgetful(PackedPages):
    """Leaves the last token of a step out."""

    def write(self, pages, slots, k, v):
        super().write(pages, slots[:-1], k[:, :-1], v[:, :-1])


class Leaking(PackedPages):
    """Gives NaN where a request has no past."""

    def attend(self, loop, q, k, v, pages, batch, out=None):
        out = super().attend(loop, q, k, v, pages, batch, out)
        return out * torch.where(batch.seq_lens.max() == 27, torch.nan, 1.0)


def paged(kind=PackedPages, **overrides):
    config = preset("INT2/4 g=32", **({"rotation": "hadamard"} | overrides))
    settings = Settings(config)
    stand_in = SimpleNamespace(
        additional_config={"residualquant": settings.config.to_dict()},
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(
                model_type="ouro", total_ut_steps=4, num_hidden_layers=2, num_key_value_heads=2, head_dim=128
            )
        ),
    )
    rotations = layer_rotations(stand_in, slice(0, 2), torch.device("cpu"))
    return kind(PageLayout(config, 128, 16), rotations, 0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("overrides", [{}, {"reference": "previous"}, {"reference": "direct", "rotation": "none"}])
def test_the_self_check_passes_what_is_right(overrides, groups):
    assert check_paged(paged(**overrides), groups, 2, torch.device("cpu")) < 1e-5


def test_the_self_check_takes_the_states_of_a_bf16_model():
    assert 1e-4 < check_paged(paged(), 1, 2, torch.device("cpu"), torch.bfloat16) < TOLERANCE


@pytest.mark.parametrize(("loops", "head_dim"), [(4, 128), (32, 96)])
def test_the_self_check_leaves_room_for_the_queries_of_the_kernels(loops, head_dim):
    class Rounding(PackedPages):
        def attend(self, loop, q, *rest):
            return super().attend(loop, q.bfloat16().float(), *rest)

    config = preset("INT2/4 g=32", rotation="hadamard")
    rotations = LayerRotations(config, KVShape(loops, 1, 2, head_dim), "cpu")
    own = Rounding(PageLayout(config, head_dim, 16, loops // 4), rotations, 0)
    assert 1e-4 < check_paged(own, 1, 2, torch.device("cpu")) < TOLERANCE / 2


@pytest.mark.parametrize("kind", [WrongLoop, Forgetful, Leaking])
def test_the_self_check_finds_what_is_wrong(kind):
    with pytest.raises(ResidualQuantError, match="differs from the reference"):
        check_paged(paged(kind), 1, 2, torch.device("cpu"))


@pytest.mark.parametrize("kind", [PackedPages, Forgetful])
def test_the_self_check_takes_one_thread_and_gives_the_others_back(kind, monkeypatch):
    threads, seen = torch.get_num_threads(), []
    write = kind.write
    monkeypatch.setattr(kind, "write", lambda *a: (seen.append(torch.get_num_threads()), write(*a)))
    set_num_threads(3)
    try:
        with contextlib.suppress(ResidualQuantError):
            check_paged(paged(kind), 1, 2, torch.device("cpu"))
        assert set(seen) == {1} and torch.get_num_threads() == 3
    finally:
        set_num_threads(threads)


@pytest.mark.parametrize(
    "overrides",
    [
        {}, {"reference": "first"}, {"reference": "previous"}, {"reference": "next"}, {"reference": "direct"},
        {"reference": "previous", "bits": (4, 16, 2, 2)}, {"reference": "next", "bits": (0, 2, 16, 4)},
    ],
)  # fmt: skip
def test_a_loop_decoded_alone_is_that_of_its_group(overrides):
    own = paged(**overrides)
    pages = torch.zeros(3, 2, own.layout.page_bytes_per_head, dtype=torch.uint8)
    k, v = torch.randn(2, 4, 5, 2, 128).bfloat16()
    slots = torch.tensor([17, 4, 18, 40, 3])
    own.write(pages, slots, k, v)
    for kind, packed in zip("kv", read_pages(pages, own.layout, slots)):
        whole = decode(replace(packed, rotation=own.rotation(0, kind)), "rotated")
        for loop in range(4):
            assert torch.equal(own.past(pages, slots, loop)["kv".index(kind)], whole[loop])


def test_padding_is_neither_attended_to_nor_written():
    own = paged()
    pages = torch.zeros(3, 2, own.layout.page_bytes_per_head, dtype=torch.uint8)
    k = torch.randn(4, 3, 2, 128).bfloat16()
    own.write(pages, torch.tensor([17, -1, 18]), k, k)
    filled = pages.clone()
    own.write(pages, torch.tensor([-1, -1, -1]), k, k)
    assert torch.equal(pages, filled)
    pages[2] = 255  # NaN scales in a page that nobody owns
    starts = torch.tensor([0, 1, 2])
    batch = StepBatch(
        query_start=starts, query_start_cpu=starts, seq_lens=torch.tensor([3, 1]),
        block_table=torch.tensor([[1, 2], [2, 2]]), slots=torch.tensor([19, 32]), decodes=2,
    )  # fmt: skip
    out = own.attend(0, torch.randn(2, 2, 128), k[0, :2], k[0, :2], pages, batch)
    assert out.isfinite().all()
