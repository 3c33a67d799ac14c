"""Which module serves a model: the original's document, and four real configurations."""

import itertools
from types import SimpleNamespace

import pytest

from fattn.plan.select import backend_for, get_attn_backend_cls

DOCUMENT = {  # (use_mla, use_sparse, use_compress)
    (False, False, False): "standard",
    (False, True, False): "standard",
    (False, False, True): "dsa",
    (False, True, True): "dsa",
    (True, False, False): "mla",
    (True, False, True): "mla",
    (True, True, False): "sfa",
    (True, True, True): "sfa",
}

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_lora_rank": None}
DEEPSEEK_V3 = {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEEPSEEK_V4 = {"hidden_size": 4096, "head_dim": 512, "q_lora_rank": 1024, "index_topk": 512, "compress_ratios": [0, 0, 4, 128, 4, 0]}


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_the_three_flags(flags):
    assert get_attn_backend_cls(*flags) == DOCUMENT[flags]


def test_a_flag_is_a_bool():
    with pytest.raises(TypeError, match="use_sparse must be True or False, got 1"):
        get_attn_backend_cls(True, 1, False)


@pytest.mark.parametrize(
    "config, home", [(LLAMA, "standard"), (DEEPSEEK_V3, "mla"), (DEEPSEEK_V32, "sfa"), (DEEPSEEK_V4, "dsa")], ids="llama v3 v32 v4".split()
)
def test_real_configurations(config, home):
    assert backend_for(config) == home
    assert backend_for(SimpleNamespace(**config)) == home


def test_an_empty_field_counts_as_absent():
    assert backend_for({"compress_ratios": [], "index_topk": 0, "kv_lora_rank": None}) == "standard"
