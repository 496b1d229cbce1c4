"""The choice of attention backends for decoder and ViT, and its reason."""

import sys
from types import ModuleType

import pytest
import torch

from mmvllm.kernels.common import dispatch
from mmvllm.kernels.paged_attention import paged_attention_torch
from mmvllm.layers import attention_choice
from mmvllm.layers.attention import (
    Flash4Attention,
    FlashAttention,
    TorchAttention,
    TorchVarlenAttention,
    TritonAttention,
)
from mmvllm.layers.attention_choice import choose_attention, choose_vision_attention, warm_up_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_FLASH = "flash is not installed; pip install 'mmvllm[flash]'"
NO_FLASH4 = "flash4 is not installed; pip install 'mmvllm[flash4]'"
FUNCTIONS = {
    "flash_attn": ("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "flash_attn.cute": ("flash_attn_varlen_func",),
    "torch.nn.attention.varlen": ("varlen_attn",),
}


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends there is a GPU, on which the named packages run every small input."""

    def pretend(*packages: str, capability=(9, 0), fails=()) -> None:
        for name, functions in FUNCTIONS.items():
            module = ModuleType(name)
            vars(module).update(dict.fromkeys(functions))
            monkeypatch.setitem(sys.modules, name, module if name in packages else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for part in ("paged", "packed"):
            monkeypatch.setattr(attention_choice, f"_try_{part}", lambda backend, *_, part=part: run(backend, part))

        def run(backend, part) -> None:
            if (backend.name, part) in fails:
                raise RuntimeError("no kernel image\nis available")

    return pretend


def test_torch_is_chosen_on_a_cpu():
    backend, reason = choose_attention("auto", 128, CPU, torch.float32, None)
    assert backend is TorchAttention and "flash needs a CUDA device, this is cpu" in reason
    assert choose_vision_attention("auto", "auto", 80, CPU, torch.float32)[0] is TorchAttention


@pytest.mark.parametrize(
    ("dtype", "block_size", "packages", "chosen", "reason"),
    [
        (torch.bfloat16, None, ["flash_attn"], "flash", "the fastest"),
        (torch.bfloat16, 256, ["flash_attn"], "flash", "the fastest"),
        (
            *(torch.bfloat16, 16, ["flash_attn"], "triton"),
            f"flash needs kvcache_block_size to be a multiple of 256, it is 16; {NO_FLASH4}",
        ),
        (
            *(torch.float32, None, ["flash_attn"], "triton"),
            f"flash needs float16 or bfloat16, the model runs in torch.float32; {NO_FLASH4}",
        ),
        (torch.bfloat16, None, [], "triton", f"{NO_FLASH}; {NO_FLASH4}"),
        (torch.bfloat16, None, ["flash_attn.cute"], "flash4", NO_FLASH),
        (
            *(torch.bfloat16, 64, ["flash_attn.cute"], "triton"),
            f"{NO_FLASH}; flash4 needs kvcache_block_size to be below 64, it is 64",
        ),
    ],
)
def test_the_fastest_usable_backend_is_chosen_on_a_gpu(dtype, block_size, packages, chosen, reason, gpu):
    gpu(*packages)
    backend, why = choose_attention("auto", 128, CUDA, dtype, block_size)
    assert (backend.name, why) == (chosen, reason)
    assert backend.block_size == (256 if chosen == "flash" else 16)  # the block size that flash-attn requires


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_packages_do_not_read_a_cache_of_codes(kv_dtype, gpu):
    gpu("flash_attn", "flash_attn.cute", "torch.nn.attention.varlen")
    arguments = (128, CUDA, torch.bfloat16, None, kv_dtype)
    backend, why = choose_attention("auto", *arguments)
    assert backend is TritonAttention and why.startswith("flash does not read keys and values in 8 bits; flash4 does")
    assert choose_attention("torch", *arguments)[0] is TorchAttention
    for name in ("flash", "flash4"):
        with pytest.raises(ValueError, match=f"is '{name}', which does not read keys and values in 8 bits"):
            choose_attention(name, *arguments)


def test_8_bit_floats_in_the_cache_need_a_gpu_that_has_them(gpu):
    gpu(capability=(8, 0))
    arguments = ("auto", 128, CUDA, torch.bfloat16, None)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' needs a GPU of compute capability"):
        choose_attention(*arguments, torch.float8_e4m3fn)
    assert choose_attention(*arguments, torch.int8)[0] is TritonAttention
    gpu(capability=(8, 9))
    assert choose_attention(*arguments, torch.float8_e4m3fn)[0] is TritonAttention


@pytest.mark.parametrize(
    ("capability", "head_dim", "reason"),
    [
        ((8, 9), 128, "needs a GPU of compute capability 9.0 or 10.x"),
        ((10, 0), 192, "needs a head size that is a multiple of 8 up to 128, this is 192"),
        ((9, 0), 192, None),
        ((10, 3), 80, None),
    ],
)
def test_flash4_is_used_where_its_kernels_are(capability, head_dim, reason, gpu):
    gpu("flash_attn.cute", capability=capability)
    if reason is None:
        assert choose_attention("flash4", head_dim, CUDA, torch.bfloat16, None)[1] == "requested"
    else:
        with pytest.raises(ValueError, match=f"^attention_backend is 'flash4', which {reason}$"):
            choose_attention("flash4", head_dim, CUDA, torch.bfloat16, None)


def test_a_namespace_of_another_package_is_not_flash_attn(gpu, monkeypatch, tmp_path):
    """flash-attn-4 alone leaves a folder flash_attn with another package in it, and no module of that name."""
    gpu()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn")
    backend, why = choose_attention("auto", 128, CUDA, torch.bfloat16, None)
    assert backend is TritonAttention
    assert "flash cannot be imported: flash_attn has no flash_attn_varlen_func" in why
    sys.modules.pop("flash_attn")


def test_a_broken_binary_is_refused_with_its_reason(gpu, monkeypatch, tmp_path):
    gpu()
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn")
    reason = "cannot be imported: undefined symbol: _ZN3c104cuda"
    backend, why = choose_attention("auto", 128, CUDA, torch.bfloat16, None)
    assert backend is TritonAttention and f"flash {reason}" in why
    with pytest.raises(ValueError, match=f"^attention_backend is 'flash', which {reason}$"):
        choose_attention("flash", 128, CUDA, torch.bfloat16, None)


def test_a_backend_that_fails_on_a_small_input_is_not_used(gpu):
    gpu("flash_attn", fails=[("flash", "paged")])
    backend, why = choose_attention("auto", 128, CUDA, torch.bfloat16, None)
    assert backend is TritonAttention
    assert why.startswith("flash fails on a small input: RuntimeError: no kernel image is available; flash4")
    assert choose_vision_attention("auto", "auto", 80, CUDA, torch.bfloat16)[0].name == "flash"


def test_torch_varlen_kernels_are_used_where_they_run(gpu):
    """In some versions of torch they take no block table: then they serve the ViT alone."""
    gpu("torch.nn.attention.varlen")
    for dtype, block_size, wanted in (
        (torch.bfloat16, None, TorchVarlenAttention),
        (torch.bfloat16, 512, TorchVarlenAttention),
        (torch.bfloat16, 16, TorchAttention),
        (torch.float32, None, TorchAttention),
    ):
        assert choose_attention("torch", 128, CUDA, dtype, block_size)[0] is wanted
    gpu("torch.nn.attention.varlen", fails=[("torch-varlen", "paged")])
    backend, why = choose_attention("torch", 128, CUDA, torch.bfloat16, None)
    assert backend is TorchAttention
    assert why == "requested; torch-varlen fails on a small input: RuntimeError: no kernel image is available"
    assert choose_vision_attention("auto", "torch", 80, CUDA, torch.bfloat16) == (TorchVarlenAttention, "requested")
    assert choose_vision_attention("auto", "auto", 80, CUDA, torch.bfloat16)[0] is TorchVarlenAttention
    assert choose_attention("auto", 128, CUDA, torch.bfloat16, None)[0] is TritonAttention


def test_the_vit_follows_the_decoder_unless_it_cannot_or_is_told_otherwise(gpu):
    gpu("flash_attn", fails=[("flash", "packed")])
    backend, why = choose_vision_attention("auto", "flash", 80, CUDA, torch.bfloat16)
    assert backend is TritonAttention and why.startswith("attention_backend is 'flash', which fails on a small input")
    assert choose_vision_attention("auto", "triton", 80, CUDA, torch.bfloat16) == (TritonAttention, "requested")
    assert choose_vision_attention("torch", "triton", 80, CUDA, torch.bfloat16)[0] is TorchAttention
    with pytest.raises(ValueError, match=r"^vision_attention_backend is 'flash', which fails on a small input"):
        choose_vision_attention("flash", "auto", 80, CUDA, torch.bfloat16)


def test_torch_is_chosen_without_triton(gpu, monkeypatch):
    gpu("torch.nn.attention.varlen")
    monkeypatch.setattr(dispatch, "triton", dispatch.SimpleNamespace(__version__=None))
    backend, why = choose_attention("auto", 128, CUDA, torch.bfloat16, None)
    assert backend is TorchVarlenAttention and "triton needs Triton, which is not installed" in why


def test_an_unusable_choice_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="attention_backend is 'flash', which needs a CUDA device"):
        choose_attention("flash", 128, CPU, torch.float32, None)
    wanted = "attention_backend must be 'auto', 'flash', 'flash4', 'triton' or 'torch', got 'fast'"
    with pytest.raises(ValueError, match=wanted):
        choose_attention("fast", 128, CPU, torch.float32, None)
    monkeypatch.setattr(dispatch.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="attention_backend is 'triton', which needs a CUDA device"):
        choose_attention("triton", 128, CPU, torch.float32, None)


@pytest.mark.slow
def test_a_backend_with_wrong_results_fails_its_trial(monkeypatch):
    attention_choice._try_paged(TritonAttention, 16, CPU, torch.float32, None)
    attention_choice._try_packed(TritonAttention, 16, CPU, torch.float32)
    monkeypatch.setattr(TorchVarlenAttention, "paged", staticmethod(lambda q, k_cache, v_cache, batch: q))
    monkeypatch.setattr(TorchVarlenAttention, "packed", staticmethod(lambda q, k, v, segments: q))
    with pytest.raises(ValueError, match=r"quantile of .* errors"):
        attention_choice._try_paged(TorchVarlenAttention, 16, CPU, torch.float32, None)
    with pytest.raises(ValueError, match=r"quantile of .* errors"):
        attention_choice._try_packed(TorchVarlenAttention, 16, CPU, torch.float32)


@pytest.mark.slow
def test_warming_up_writes_nothing_to_the_cache():
    cache = torch.randn(2, 1, 16, 2, 32)
    before = cache.clone()
    warm_up_attention(TritonAttention, 4, cache, cache.dtype)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("query_lens", "num_decodes"), [([1, 1, 1], 0), ([1, 1, 5, 20], 2), ([7, 3], 0), ([1, 1, 1, 4, 1], 3)]
)
def test_flash_attn_runs_decodes_and_prompts_apart(query_lens, num_decodes, gpu):
    """With functions of its packages that compute in plain torch: which rows and lengths each gets."""
    gpu("flash_attn", "flash_attn.cute")
    generator = torch.Generator().manual_seed(0)
    batch = attention_choice._small_step(query_lens, num_decodes, CPU)
    cache = torch.randn(2, 2, 16, 2, 8, generator=generator)
    q = torch.randn(sum(query_lens), 4, 8, generator=generator)
    want = TorchAttention.paged(q, *cache, batch)

    def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
        bounds = torch.arange(len(q) + 1, dtype=torch.int32)
        return paged_attention_torch(q[:, 0], k_cache, v_cache, bounds, cache_seqlens, block_table, 1)[:, None]

    def varlen(q, k, v, *, cu_seqlens_q, block_table, kv_lens):
        first, out = int(cu_seqlens_q[0]), torch.full_like(q, torch.nan)
        longest = int(cu_seqlens_q.diff().max())
        out[first:] = paged_attention_torch(q[first:], k, v, cu_seqlens_q - first, kv_lens, block_table, longest)
        return out

    def varlen2(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, block_table):
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        return varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, block_table=block_table, kv_lens=cu_seqlens_k.diff().int())

    def varlen4(q, k, v, *, cu_seqlens_q, seqused_k, page_table, causal):
        return varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, block_table=page_table, kv_lens=seqused_k), None

    sys.modules["flash_attn"].flash_attn_with_kvcache = with_kvcache
    sys.modules["flash_attn"].flash_attn_varlen_func = varlen2
    sys.modules["flash_attn.cute"].flash_attn_varlen_func = varlen4
    for backend in (FlashAttention, Flash4Attention):
        torch.testing.assert_close(backend.paged(q, *cache, batch), want)
