"""Tiny random models of many `transformers` families: what the tests decode, and what is refused.

Every builder takes changes to the config: `FAMILIES["llama"](tie_word_embeddings=True)`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OlmoeConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    xLSTMConfig,
)

VOCAB = 400  # tokens of the tiny tokenizer
WINDOW = 8
LAYERS = 4

ALL_EXPERTS = {"num_experts_per_tok": 4, "topk_group": 2}
"""Changes after which a mixture of experts takes them all, so that rounding chooses nothing."""

Build = Callable[..., PreTrainedConfig]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_ATTENTION: dict[str, Any] = {
    **_COMMON,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform, so that greedy choices are no near-ties
}
_HALF = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_RECURRENT_HALF = ["linear_attention", "full_attention"] * (LAYERS // 2)


def _attention(kind: Callable[..., PreTrainedConfig], **options: Any) -> Build:
    """Rows of keys and values and nothing else."""
    return lambda **changes: kind(**{**_ATTENTION, **options, **changes})


def _llama(kind: Callable[..., PreTrainedConfig], **options: Any) -> Build:
    """Llama's sizes: a gated MLP, two queries a key."""
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2}
    return _attention(kind, **{**sizes, **options})


def _latent(kind: Callable[..., PreTrainedConfig], **options: Any) -> Build:
    """Multi-head latent attention: keys wider than values, mostly dense layers."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    more = {"v_head_dim": 6, "moe_intermediate_size": 16, "n_shared_experts": 1}
    return _llama(
        kind,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        **{**sizes, **experts, **more, **options},
    )


def _recurrent(kind: Callable[..., PreTrainedConfig], **options: Any) -> Build:
    """A state that a token changes for good."""
    return lambda **changes: kind(**{**_COMMON, **options, **changes})


FAMILIES: dict[str, Build] = {
    "llama": _llama(LlamaConfig, head_dim=8),
    "llama-tied": _llama(LlamaConfig, head_dim=8, tie_word_embeddings=True),
    "llama-padded": _llama(LlamaConfig, vocab_size=VOCAB + 48),  # rows beyond the tokenizer
    "mistral": _llama(MistralConfig, sliding_window=WINDOW),
    "qwen2": _llama(Qwen2Config),
    "qwen2-window": _llama(
        Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, layer_types=_HALF
    ),
    "qwen3": _llama(Qwen3Config, head_dim=16),  # 4 heads of 16, hidden size 32
    "gemma2": _llama(
        Gemma2Config,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_HALF,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _llama(
        Gemma3TextConfig,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_HALF,
        query_pre_attn_scalar=8,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt2": _attention(GPT2Config),  # learned positions, tied
    "opt": _attention(  # learned positions that count from 2
        OPTConfig, ffn_dim=48, word_embed_proj_dim=32, init_std=0.2
    ),
    "gpt_neox": _attention(
        GPTNeoXConfig,
        intermediate_size=48,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi": _llama(PhiConfig, num_key_value_heads=4),
    "olmo": _llama(OlmoConfig, clip_qkv=2.0),
    "olmo2": _llama(Olmo2Config),
    "mixtral": _llama(MixtralConfig, num_local_experts=4, sliding_window=WINDOW),
    "qwen2_moe": _llama(
        Qwen2MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
    "olmoe": _llama(OlmoeConfig, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "deepseek_v2": _latent(DeepseekV2Config, topk_method="group_limited_greedy"),
    "deepseek_v3": _latent(DeepseekV3Config),
    "gpt_oss": _llama(  # attention sinks
        GptOssConfig,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_HALF,
    ),
}
"""Families that are decoded, with any number of tokens at once and rolled back."""

WINDOWED = ("mistral", "qwen2-window", "gemma2", "gemma3", "mixtral", "gpt_oss")
"""Those of them in which some layer sees the last `WINDOW` tokens only."""

RECURRENT: dict[str, Build] = {
    "mamba": _recurrent(MambaConfig, state_size=4),
    "mamba2": _recurrent(
        Mamba2Config, num_heads=8, head_dim=8, state_size=4, n_groups=1, chunk_size=8
    ),
    "recurrent_gemma": _recurrent(
        RecurrentGemmaConfig,
        num_attention_heads=4,
        intermediate_size=48,
        lru_width=32,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
    "jamba": _llama(
        JambaConfig,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "qwen3_next": _llama(
        Qwen3NextConfig,
        head_dim=8,
        layer_types=_RECURRENT_HALF,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": _llama(Lfm2Config, layer_types=["conv", "full_attention"] * (LAYERS // 2)),
    "bamba": _llama(
        BambaConfig,
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=8,
    ),
    "falcon_h1": _llama(
        FalconH1Config,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=8,
    ),
    "rwkv": _recurrent(RwkvConfig, attention_hidden_size=32, intermediate_size=48),
}
"""Families with a state that cannot be cut back: refused by name before anything is decoded."""

UNSUITED: dict[str, Build] = {
    "xlstm": _recurrent(xLSTMConfig, num_heads=4, chunk_size=8),
    "gpt_neo": _attention(GPTNeoConfig, attention_types=[[["global", "local"], LAYERS // 2]]),
    "bart": _attention(
        BartConfig,
        d_model=32,
        decoder_layers=LAYERS,
        decoder_ffn_dim=48,
        is_decoder=True,
        is_encoder_decoder=False,
    ),
    "bloom": _attention(BloomConfig),
    "bert": _attention(BertConfig, intermediate_size=48, is_decoder=True),
    "openai-gpt": _attention(OpenAIGPTConfig),
}
"""Refused by name too: another kind of cache, windows counted from the batch's end, positions that
cannot be given, a mask of their own, more between states and logits than a head, no cache."""


def save_tiny(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save a random float32 model of `config` with that tokenizer; load it with `load_target`.

    Every vector is noisy, norms and biases too: a forgotten one changes the output.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
