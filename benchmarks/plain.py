"""The plain version of one training step: the formulas as they stand, one masked pass after another.

Written straight from the method, for two uses: the oracle that the engine is tested against, and the baseline that its speed
is measured against.

1. The original model runs once without gradients, and hook points show the input of every site.
2. Importance functions compute their whole hidden layer, ``[batch, pos, d_gate, C]``, and their whole score matrix.
3. Every masked pass of every reconstruction term runs from the tokens to the logits; its KL is taken from full logits.
4. The weighted sum of the terms is differentiated once through all of it by ordinary automatic differentiation.

Nothing here is shared with ``tl_spd.engine`` or ``tl_spd.gates``. What a term asks for (its passes) and how a pass is hooked
into a host (``pass_hooks``) are the package's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens import HookedTransformer

from tl_spd.importance import AttentionImportance, Importances, ScalarImportance, VectorImportance
from tl_spd.install import pass_hooks
from tl_spd.losses import Faithfulness, ImportanceMinimality, LossTerm, ReconTerm, Step
from tl_spd.masks import Pass
from tl_spd.run import Run
from tl_spd.sites import weight
from tl_spd.wiring import read_hooks


def host_kwargs(attention_mask: Tensor | None) -> dict[str, Tensor]:
    """The keyword that hands padding to the host, where there is any."""
    return {} if attention_mask is None else {"attention_mask": attention_mask}


def scored_places(tokens: Tensor, attention_mask: Tensor | None, last_token_only: bool) -> Tensor:
    """Boolean ``[batch, pos]``: all real positions, or the last real one of each sequence."""
    real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if not last_token_only:
        return real
    count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    last = F.one_hot((real * count).argmax(1), tokens.shape[1]).bool()
    return last & real


# --- importance functions --------------------------------------------------------------------------------------------


def scalar_gamma(gates: nn.Module, inner: Tensor) -> Tensor:
    """``sum_k w2[k, c] gelu(a_c w1[k, c] + b1[k, c]) + b2[c]``."""
    hidden = F.gelu(inner[..., None, :] * gates.W1 + gates.b1)
    return (hidden * gates.W2).sum(-2) + gates.b2


def vector_gamma(gates: nn.Module, x: Tensor) -> Tensor:
    """``sum_k w2[k, c] gelu(sum_i x_i w1[i, k, c] + b1[k, c]) + b2[c]``."""
    hidden = F.gelu(torch.einsum("bpi,ikc->bpkc", x, gates.W1) + gates.b1)
    return (hidden * gates.W2).sum(-2) + gates.b2


def attention_gamma(function: AttentionImportance, x: Tensor, real: Tensor | None) -> Tensor:
    """One bidirectional head with relative and absolute positions, then the vector gates on what it brought beside its input."""
    pos = x.shape[1]
    x_pos = x + function.absolute[:pos]
    q, k, v = x @ function.W_Q, x @ function.W_K, x_pos @ function.W_V
    place = torch.arange(pos, device=x.device)
    offset = place[None, :] - place[:, None] + function.n_ctx  # j - i + s
    if function.relative.ndim == 2:
        r = (q @ function.relative.T).gather(-1, offset.expand(x.shape[0], pos, pos))
    else:
        r = function.relative[offset]
    scores = (q @ k.mT + r) / math.sqrt(q.shape[-1])
    if real is not None:
        scores = scores.masked_fill(~real[:, None, :], torch.finfo(scores.dtype).min)
    return vector_gamma(function.gates, torch.cat([scores.softmax(-1) @ v, x_pos], dim=-1))


def gamma(function: nn.Module, x: Tensor, inner: Tensor, real: Tensor | None) -> Tensor:
    """The pre-activations ``[batch, pos, C]`` of an importance function; kinds not written out here speak for themselves."""
    if isinstance(function, ScalarImportance):
        return scalar_gamma(function.gates, inner)
    if isinstance(function, VectorImportance):
        return vector_gamma(function.gates, x)
    if isinstance(function, AttentionImportance):
        return attention_gamma(function, x, real)
    return function(x, inner, real)


# --- the step --------------------------------------------------------------------------------------------------------


def original(
    model: HookedTransformer, run: Run, tokens: Tensor, attention_mask: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """One pass of the original model: inputs of the sites, indices of the look-ups, logits."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if attention_mask is not None:  # real tokens are counted, padded places look nothing up
        positions = torch.where(attention_mask.bool(), attention_mask.cumsum(1) - 1, -1)
    lookups = {"embed.W_E": tokens, "pos_embed.W_pos": positions}
    inputs: dict[str, Tensor] = {}
    with torch.no_grad():
        hooks = read_hooks(model, run.sites, inputs, lookups)
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks, **host_kwargs(attention_mask))
    one = {name: x[:, :, 0] if x.ndim == 4 else x for name, x in inputs.items()}  # split heads all read the same here
    return one, {name: index for name, index in lookups.items() if name in run.components}, logits


def importances(
    model: HookedTransformer,
    run: Run,
    inputs: Mapping[str, Tensor],
    lookups: Mapping[str, Tensor],
    attention_mask: Tensor | None = None,
) -> Importances:
    """The importances of one pass of the original model, with gradients to the Run's parameters."""
    real = None if attention_mask is None else attention_mask.bool()
    pre = {}
    for site in run.sites:
        if site.name not in inputs:
            continue
        x, read = inputs[site.name], run.components[site.name].read
        if site.lookup:
            row, some = x.clamp(min=0), (x >= 0)[..., None]
            x, inner = weight(model, site).to(read.dtype)[row], read[row] * some
        else:
            x = x.to(read.dtype)
            inner = x @ read
        pre[site.name] = gamma(run.functions[site.name], x, inner, real)
    return Importances(pre, lookups, real)


def kl(
    model: HookedTransformer,
    run: Run,
    tokens: Tensor,
    entry: Pass,
    found: Importances,
    original_logits: Tensor,
    attention_mask: Tensor | None = None,
    last_token_only: bool = False,
) -> Tensor:
    """KL(P || Q) in nats of one masked pass, a mean over the scored positions."""
    hooks = pass_hooks(model, run, entry, found)
    logits = model.run_with_hooks(tokens, fwd_hooks=hooks, **host_kwargs(attention_mask))
    scored = scored_places(tokens, attention_mask, last_token_only)
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = original_logits[scored].to(wide).log_softmax(-1), logits[scored].to(wide).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def faithfulness(model: HookedTransformer, run: Run) -> Tensor:
    """Mean over all entries of all decomposed matrices of ``(W - read @ write)^2``."""
    total, entries = torch.zeros(()), 0
    for site in run.sites:
        parts = run.components[site.name]
        difference = weight(model, site).to(parts.read.dtype) - parts.read @ parts.write
        total, entries = total + difference.square().sum(), entries + difference.numel()
    return total / entries


def minimality(term: ImportanceMinimality, found: Importances, progress: float) -> Tensor:
    """Mean over real positions of ``sum (upper(g) + eps)^p``, with ``upper`` linear at slope 0.01 above 1."""
    p = term.p_start + progress * (term.p_final - term.p_start)
    total = 0.0
    for pre in found.pre.values():
        value = torch.where(pre > 1, 1 + 0.01 * (pre - 1), pre.clamp(min=0))
        total = total + (value + term.eps).pow(p).sum(-1)
    return total.mean() if found.real is None else total[found.real].mean()


def plain_step(
    model: HookedTransformer,
    run: Run,
    terms: Sequence[LossTerm],
    tokens: Tensor,
    generator: torch.Generator,
    attention_mask: Tensor | None = None,
    last_token_only: bool = False,
    progress: float = 0.0,
    by_pass: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Values of the terms before their coefficients, and the gradients of the weighted sum for ``run.parameters()``.

    The Run's parameters must require gradients. As in training, reconstruction terms draw their masks first, in order.
    ``by_pass``: every pass is differentiated before the next one, so that the graph of one pass is held at a time. Passes then
    see importances that are cut off from the functions; what arrives there goes on through the functions once.
    """
    inputs, lookups, logits = original(model, run, tokens, attention_mask)
    found = importances(model, run, inputs, lookups, attention_mask)
    cut = Importances(found.pre, found.lookups, found.real)
    cut.update({name: value.detach().requires_grad_() for name, value in found.items()})
    shown, parameters = cut if by_pass else found, list(run.parameters())
    wanted = [*parameters, *cut.values()]
    sums = [torch.zeros_like(each) for each in wanted] if by_pass else []

    def add(total: Tensor) -> None:
        gradients = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
        for into, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                into += gradient

    def one_kl(entry: Pass) -> Tensor:
        return kl(model, run, tokens, entry, shown, logits, attention_mask, last_token_only)

    values, total = dict.fromkeys((term.name for term in terms), torch.zeros(())), torch.zeros(())
    for term, share, value in parts(model, run, terms, shown, generator, progress, one_kl):
        values[term.name] = values[term.name] + share * value.detach()
        if by_pass:
            add(term.coeff_at(progress) * share * value)
        else:
            total = total + term.coeff_at(progress) * share * value
    if not by_pass:
        gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        return values, list(gradients)
    arrived = sums[len(parameters) :]
    add(torch.stack([(value * gradient).sum() for value, gradient in zip(found.values(), arrived, strict=True)]).sum())
    return values, sums[: len(parameters)]


def parts(
    model: HookedTransformer,
    run: Run,
    terms: Sequence[LossTerm],
    shown: Importances,
    generator: torch.Generator,
    progress: float,
    one_kl: Callable[[Pass], Tensor],
) -> Iterator[tuple[LossTerm, float, Tensor]]:
    """Every term with its values and the share of each in it: a reconstruction term has one per pass, made when asked for."""
    chosen = [(term, term.passes(shown, generator)) for term in terms if type(term).value is ReconTerm.value]
    for term, passes in chosen:
        yield from ((term, 1 / len(passes), one_kl(entry)) for entry in passes)
    for term in terms:
        if isinstance(term, Faithfulness):
            yield term, 1.0, faithfulness(model, run)
        elif isinstance(term, ImportanceMinimality):
            yield term, 1.0, minimality(term, shown, progress)
        elif type(term).value is not ReconTerm.value:
            weights = {site.name: weight(model, site) for site in run.sites}
            all_kl = lambda passes: torch.stack([one_kl(entry) for entry in passes])  # noqa: E731
            yield term, 1.0, term.value(Step(run, shown, weights, progress, generator, all_kl))
